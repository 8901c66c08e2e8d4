"""Pictures with a mask each: ``images/`` and ``masks/`` with the same names.

A mask has a part that is meant, and the rest. Its pixels are meant where they are brighter than
half; in a mask without any value above 1, where they are 1. A coloured pixel is as bright as its
brightest channel.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
import torch

from onefold.data.bad import BadFile, refuse
from onefold.data.classes import held_out, test_folder
from onefold.data.digest import digest_of
from onefold.data.pictures import Sums, decode_picture, look_through, open_picture
from onefold.data.walk import picture_paths
from onefold.errors import DataError

if TYPE_CHECKING:
    from PIL.Image import Image

__all__ = ["MaskedPictures", "Pair", "read_mask", "read_pairs"]

_HALF = 127


@dataclass(frozen=True, slots=True)
class Pair:
    """A picture and its mask."""

    image: Path
    mask: Path

    @property
    def name(self) -> str:
        """What to call it where people look at it."""
        return self.image.name


@dataclass(frozen=True, slots=True, kw_only=True)
class MaskedPictures:
    """A data set of pictures with a mask each."""

    train: list[Pair]
    test: list[Pair]
    sums: Sums
    """Over the pixels of the training pictures, as RGB."""
    meant: int
    """Pixels of the training masks that are meant."""
    pixels: int
    """All pixels of the training masks."""
    shortest: int
    """The shortest side of a training picture, in pixels."""
    left_out: list[BadFile]
    """What cannot be used."""

    @property
    def digest(self) -> str:
        """The same for the same pictures, by their names and sums."""
        names = [[pair.name for pair in split] for split in (self.train, self.test)]
        return digest_of(names, self.sums.totals, self.sums.squares, self.meant)


def read_pairs(directory: Path, *, holdout: float, seed: int, skip_bad: bool) -> MaskedPictures:
    """Find pictures and masks, and read each of them once to see whether it can be.

    Args:
        directory: holds ``train`` and ``test`` (or ``val``) with ``images`` and ``masks`` each, or
            ``images`` and ``masks`` themselves.
        holdout: share that becomes the test set where there is none.
        seed: draws that share.
        skip_bad: leave out what cannot be used; otherwise it is refused.

    Raises:
        DataError: the folder has no such layout, or something in it cannot be used.
    """
    if (directory / "train").is_dir():
        train, test = _pairs(directory / "train"), _pairs(test_folder(directory))
    else:
        whole = _pairs(directory)
        held = held_out(["pair"] * len(whole.pairs), share=holdout, seed=seed)
        train = _Found([p for i, p in enumerate(whole.pairs) if i not in held], whole.bad)
        test = _Found([p for i, p in enumerate(whole.pairs) if i in held], [])
    looks = look_through(_look, train.pairs), look_through(_look, test.pairs)
    bad = [*train.bad, *test.bad]
    bad += [look for part in looks for look in part if isinstance(look, BadFile)]
    if not skip_bad:
        refuse(bad)
    sound = [[look for look in part if isinstance(look, _Look)] for part in looks]
    if not sound[0] or not sound[1]:
        raise DataError(
            f"{directory}: expected pictures with masks to train and to test with, found "
            f"{len(sound[0])} and {len(sound[1])}"
        )
    if not any(look.meant for look in sound[1]):
        raise DataError(
            f"{directory}: expected masks to score with, none of the {len(sound[1])} to test with "
            f"has a pixel that is meant"
        )
    sums = Sums()
    for look in sound[0]:
        sums.join(look.sums)
    return MaskedPictures(
        train=[look.pair for look in sound[0]],
        test=[look.pair for look in sound[1]],
        sums=sums,
        meant=sum(look.meant for look in sound[0]),
        pixels=sums.count,
        shortest=min(look.shortest for look in sound[0]),
        left_out=bad,
    )


def read_mask(path: Path) -> Image:
    """A mask of mode ``L``, 255 where it is meant and 0 elsewhere.

    Raises:
        DataError: it cannot be read, or has numbers of classes, or only dark pixels.
    """
    return _binary(open_picture(path, scaled=False), path)


def _binary(mask: Image, path: Path) -> Image:
    from PIL import Image

    values = np.asarray(mask)
    if values.ndim == 3:
        values = values.max(axis=2)
    brightest = int(values.max(initial=0))
    if 1 < brightest <= _HALF:
        raise DataError(
            f"{path}: expected a mask of 0 and 1, or of 0 and 255, the brightest pixel of this one "
            f"has {brightest}"
        )
    if brightest > 1 and set(np.unique(values).tolist()) <= {0, 1, brightest} and 1 in values:
        raise DataError(
            f"{path}: expected a mask of 0 and 1, or of 0 and 255, this one has 1 and {brightest}, "
            f"so that nobody knows which is meant"
        )
    limit = _HALF if brightest > 1 else 0
    return Image.fromarray(np.where(values > limit, 255, 0).astype(np.uint8))


def mask_tensor(mask: Image) -> torch.Tensor:
    """(h, w) float32, 1 where it is meant."""
    return torch.from_numpy(np.array(mask)).to(torch.float32) / 255


@dataclass(frozen=True, slots=True)
class _Found:
    pairs: list[Pair]
    bad: list[BadFile]


@dataclass(frozen=True, slots=True)
class _Look:
    pair: Pair
    sums: Sums
    meant: int
    shortest: int


def _pairs(directory: Path) -> _Found:
    """Pictures with a mask of the same name, whatever the ending."""
    bad: list[BadFile] = []
    images, masks = (_by_stem(directory / name, bad) for name in ("images", "masks"))
    if not images:
        raise DataError(f"{directory / 'images'}: expected pictures, found none")
    bad += [*_doubles(images), *_doubles(masks)]
    bad += [
        BadFile(paths[0], f"there is no mask of that name in {directory / 'masks'}")
        for stem, paths in images.items()
        if stem not in masks and len(paths) == 1
    ]
    bad += [
        BadFile(paths[0], f"there is no picture of that name in {directory / 'images'}")
        for stem, paths in masks.items()
        if stem not in images and len(paths) == 1
    ]
    both = [
        Pair(paths[0], masks[stem][0])
        for stem, paths in images.items()
        if len(paths) == len(masks.get(stem, ())) == 1
    ]
    return _Found(both, bad)


def _doubles(by_stem: Mapping[str, Sequence[Path]]) -> list[BadFile]:
    """Files of which nobody knows which one is meant: all of a name but for the ending."""
    return [
        BadFile(path, f"expected one file of that name, there is {other.name} as well")
        for paths in by_stem.values()
        if len(paths) > 1
        for path, other in zip(paths, [*paths[1:], paths[0]], strict=True)
    ]


def _by_stem(directory: Path, bad: list[BadFile]) -> dict[str, list[Path]]:
    """Pictures by their path without the ending."""
    if not directory.is_dir():
        raise DataError(
            f"{directory.parent}: expected the folders images and masks, there is no "
            f"{directory.name}"
        )
    found: dict[str, list[Path]] = {}
    for path in picture_paths(directory, bad):
        found.setdefault(str(path.relative_to(directory).with_suffix("")), []).append(path)
    return found


def _look(pair: Pair) -> _Look | BadFile:
    path = pair.image
    try:
        image = decode_picture(path).convert("RGB")
        path = pair.mask
        mask = _binary(decode_picture(path, scaled=False), path)
    except DataError as error:
        return BadFile(path, str(error).removeprefix(f"{path}: "))
    if mask.size != image.size:
        return BadFile(
            pair.mask,
            f"expected a mask of {image.width}x{image.height} pixels, the size of "
            f"{pair.image}, got {mask.width}x{mask.height}",
        )
    sums = Sums()
    sums.add(np.asarray(image))
    return _Look(pair, sums, int(np.count_nonzero(np.asarray(mask))), min(image.size))
