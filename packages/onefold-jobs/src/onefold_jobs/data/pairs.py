"""Reads images with masks: folders ``images`` and ``masks`` with files of the same names."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

from onefold.cli import listed
from onefold.errors import DataError
from onefold_jobs.audience import tell
from onefold_jobs.data.files import BadFile, digest_of, readable, refuse
from onefold_jobs.data.folds import Fold, unused
from onefold_jobs.data.labels import Sample, check_same
from onefold_jobs.data.masks import (
    AUTO,
    MOST_CLASSES,
    MaskClass,
    MaskLook,
    MaskRule,
    colors_of,
    look_at_mask,
    require_one_foreground,
)
from onefold_jobs.data.pictures import (
    Look,
    PictureData,
    look_at,
    picture_paths,
    sum_looks,
    white_of,
)
from onefold_jobs.data.samples import hold_out
from onefold_jobs.data.scan import (
    Scanning,
    Seen,
    by_one_white,
    content_of,
    notes_of,
    pack_scan,
    scan_files,
)
from onefold_jobs.data.splits import Folders, find_folders, is_mask

__all__ = ["MaskedPictures", "Pair", "read_pairs", "read_pairs_to_test"]


@dataclass(frozen=True, slots=True)
class Pair:
    """An image and its mask."""

    image: Path
    mask: Path


@dataclass(frozen=True, slots=True, kw_only=True)
class MaskedPictures(PictureData):
    """A dataset of images and masks."""

    train: list[Pair]
    test: list[Pair]
    foreground: int
    """Number of foreground pixels in the training masks."""
    pixels: int
    """Number of training mask pixels that are not void."""
    void: int = 0
    """Number of void pixels in the training masks."""
    counts: tuple[list[int], list[int]] = ([], [])
    """Pixels of the training and test masks by class, or of background and foreground."""
    shortest: int
    """Shortest side of all training images, in pixels."""
    rule: MaskRule = field(default_factory=MaskRule)
    """Mapping of mask values to foreground or classes, and to void."""
    classes: tuple[MaskClass, ...] = ()
    """Classes of the pixels; empty for foreground masks."""


def read_pairs(
    directory: Path,
    *,
    holdout: float,
    seed: int,
    skip_bad: bool,
    rule: MaskRule | None = None,
    scanning: Scanning | None = None,
    fold: Fold | None = None,
) -> MaskedPictures:
    """Find images and masks, and read each once to check it.

    Args:
        directory: folder with a training and a test set, as `find_folders` finds them, each with
            ``images`` and ``masks``; or with ``images`` and ``masks``, which may contain both sets.
        holdout: fraction for the test set, if there is none, 0 to 1.
        seed: seed of the generator that draws the test set.
        skip_bad: skip unusable files instead of rejecting the dataset.
        rule: foreground values of the masks; None lets brightness decide.
        scanning: known files and a progress callback; None for neither.
        fold: fold of the training set to test on, instead of a test set.

    Raises:
        DataError: the folder has no such layout, or something in it cannot be used.
    """
    rule = rule or MaskRule()
    bad: list[BadFile] = []
    train, given, folders = pairs_in(directory, bad)
    notes = folders.notes
    if fold and given is not None:
        given, notes = None, [*notes, unused(folders.test or directory)]
    # All pairs form one stratum, because they have no labels to stratify by.
    how: Any = {"share": holdout, "seed": seed, "fold": fold}
    train, test = (
        (train, given)
        if given is not None
        else hold_out(train, [""] * len(train), **how, content=lambda pair: content_of(pair.image))
    )
    images = len(train) + len(test) + sum(not is_mask(each.path, directory) for each in bad)
    looks = _look_through([*train, *test], directory, rule, scanning, bad)
    # Split again, because both sets were scanned together, and some pairs may be dropped.
    known = set(train)
    white = white_of(x.seen.look for x in looks if x.pair in known)
    looks = by_one_white(looks, white, bad)
    if not skip_bad:
        refuse(bad, looks, images)
    require_one_foreground([(x.pair.mask, x.mask.look) for x in looks])
    _require_named(directory, rule, looks)
    parts = [[look for look in looks if (look.pair in known) is first] for first in (True, False)]
    if not parts[0] or not parts[1]:
        raise DataError(
            f"{directory}: expected images with masks for training and testing, found "
            f"{len(parts[0])} and {len(parts[1])}"
        )
    # Without any foreground, a Dice score is 0 / 0.
    if not any(look.mask.look.foreground for look in parts[1]):
        raise DataError(
            f"{directory}: expected test masks with foreground, but none of the {len(parts[1])} "
            f"has a foreground pixel"
        )
    data = _of_looks(directory, parts[0], parts[1], bad, rule)
    return replace(data, notes=[*notes, *data.notes], own_test=given is not None)


def read_pairs_to_test(
    directory: Path, rule: MaskRule, bad: list[BadFile], scanning: Scanning
) -> tuple[Path, list[Pair]]:
    """Find images and masks to score a trained model on, and read each once.

    Args:
        directory: as in training, or a part of it. Its test set is used, or all of it if there is
            no split.
        rule: foreground values of the masks, as in training.
        bad: list that receives unusable files.
        scanning: how to scan the files.

    Returns:
        The folder that contains ``images`` and ``masks``, and the pairs.

    Raises:
        DataError: there are no such folders, or the masks are of two kinds.
    """
    pairs, given, folders = pairs_in(directory, bad, choosing=False)
    where = folders.train if folders.test is None else folders.test
    looks = _look_through(pairs if given is None else given, where, rule, scanning, bad)
    require_one_foreground([(x.pair.mask, x.mask.look) for x in looks])
    for note in notes_of([look.seen.look for look in looks]):
        tell(note)
    return where, [look.pair for look in looks]


def _of_looks(
    directory: Path,
    train: Sequence[_Look],
    test: Sequence[_Look],
    bad: list[BadFile],
    rule: MaskRule,
) -> MaskedPictures:
    both = [*train, *test]
    pictures = [look.seen.look for look in both]
    files: list[tuple[Path, Seen[Any]]] = []
    for pair, picture, mask in both:
        files += [(pair.image, picture), (pair.mask, mask)]
    masks = [look.mask.look for look in train]
    void = sum(mask.void for mask in masks)
    samples = [[look.sample(directory) for look in part] for part in (train, test)]
    # A mask is its image's label: an image with two masks contradicts itself.
    labeled = [[Sample(name, mask, image) for name, _, image, mask in part] for part in samples]
    rule, classes, notes = _with_classes(rule, [look.mask.look for look in both], masks)
    names = [name for name, _ in rule.named]
    return MaskedPictures(
        train=[look.pair for look in train],
        test=[look.pair for look in test],
        sums=sum_looks(pictures[: len(train)], gray=False),
        foreground=sum(mask.foreground for mask in masks),
        pixels=sum(math.prod(mask.size) for mask in masks) - void,
        void=void,
        counts=(_class_pixels(masks, names), _class_pixels([x.mask.look for x in test], names)),
        shortest=min(min(picture.size) for picture in pictures[: len(train)]),
        left_out=bad,
        rule=rule,
        classes=classes,
        white=white_of(pictures[: len(train)]),
        notes=[*notes, *notes_of(pictures, len(train)), *check_same(labeled, readable(directory))],
        scan=pack_scan(files, directory),
        digest=digest_of(*samples, str(rule), size_bytes=16),
    )


def _with_classes(
    rule: MaskRule, looks: Sequence[MaskLook], train: Sequence[MaskLook]
) -> tuple[MaskRule, tuple[MaskClass, ...], list[str]]:
    """Determine the classes of masks: their values and colors, and messages for the user.

    Raises:
        DataError: the masks have only one class.
    """
    if not rule.classes:
        return rule, (), []
    colors = {value: color for look in reversed(looks) for value, color in look.colors.items()}
    found: list[str] = []
    if rule.classes == AUTO:
        # Sort as numbers, or 10 would precede 2; colors sort as strings.
        found = sorted({value for look in looks for value in look.counts}, key=_in_order)
        if len(found) > MOST_CLASSES:
            raise DataError(
                f"--classes auto: expected masks of at most {MOST_CLASSES} classes, got "
                f"{len(found):,} different values"
            )
        rule = replace(rule, classes=tuple(f"{value}={value}" for value in found))
    named = [(name, [span.text for span in spans]) for name, spans in rule.named]
    if len(named) < 2:
        raise DataError(f"--classes: expected masks of two classes or more, got {len(named)}")
    seen = {name for look in train for name in look.counts}
    lacking = [name for name, _ in named if name not in seen]
    notes = [f"no training mask has a pixel of {listed(lacking)}"] if lacking else []
    if found:
        notes.insert(0, f"--classes auto: one class per value of the masks, {listed(found, 20)}")
    return rule, colors_of(named, colors), notes


def _class_pixels(looks: Sequence[MaskLook], names: Sequence[str]) -> list[int]:
    """Count the pixels of each class; of background and foreground if there are no classes."""
    if names:
        return [sum(look.counts.get(name, 0) for look in looks) for name in names]
    foreground = sum(look.foreground for look in looks)
    counted = sum(math.prod(look.size) - look.void for look in looks)
    return [counted - foreground, foreground]


def _in_order(value: str) -> tuple[int, str]:
    return (int(value) if value.isdecimal() else 0, value)


class _Look(NamedTuple):
    """A usable pair, and the scan results of its two files."""

    pair: Pair
    seen: Seen[Look]
    """Scan result of the image."""
    mask: Seen[MaskLook]

    @property
    def path(self) -> Path:
        """Path of the image."""
        return self.pair.image

    def sample(self, root: Path) -> list[str]:
        """List the names and the content digests of image and mask."""
        names = [str(path.relative_to(root)) for path in (self.path, self.pair.mask)]
        return [*names, self.seen.content, self.mask.content]


def _look_through(
    pairs: Sequence[Pair],
    directory: Path,
    rule: MaskRule,
    scanning: Scanning | None,
    bad: list[BadFile],
) -> list[_Look]:
    """Scan all pairs; return the usable ones, and add unusable files to ``bad``."""
    # The rule is part of the masks' kind, because scan results are only valid for the same rule.
    scanning = scanning or Scanning()
    see, see_mask = partial(look_at, white=scanning.white), partial(look_at_mask, rule=rule)
    files = [(pair.image, "picture", see) for pair in pairs]
    masks = [(pair.mask, f"mask:{rule}", see_mask) for pair in pairs]
    found = scan_files([*files, *masks], directory, scanning)
    looks = []
    for pair, picture, mask in zip(pairs, found[: len(pairs)], found[len(pairs) :], strict=True):
        if isinstance(picture, Seen) and isinstance(mask, Seen):
            # Both after EXIF rotation: a rotated image needs an upright mask.
            width, height = picture.look.size
            if mask.look.size == (width, height):
                looks.append(_Look(pair, picture, mask))
                continue
            expected = f"{width}x{height} pixels, the size of {readable(pair.image)}"
            came = "x".join(map(str, mask.look.size))
            bad.append(BadFile(pair.mask, f"expected a mask of {expected}, got {came}"))
        bad += [each for each in (picture, mask) if isinstance(each, BadFile)]
    return looks


def _require_named(directory: Path, rule: MaskRule, looks: Sequence[_Look]) -> None:
    """Reject a rule with values that no mask contains, which is probably a mistake.

    Raises:
        DataError: no mask contains a value of the rule.
    """
    found = {text for look in looks for text in look.mask.look.named}
    for option in ("foreground", "void"):
        for text in getattr(rule, option):
            if looks and text not in found:
                values = dict.fromkeys(value for x in looks for value in x.mask.look.values)
                raise DataError(
                    f"--{option} {text}: no mask in {readable(directory)} has this value; "
                    f"their values include {', '.join([*values][:8])}"
                )


def pairs_in(
    directory: Path, bad: list[BadFile], *, choosing: bool = True
) -> tuple[list[Pair], list[Pair] | None, Folders]:
    """Find the training and test pairs; the latter are None without a split.

    Raises:
        DataError: there are no such folders.
    """
    folders = find_folders(directory, choosing=choosing, masks=True)
    if folders.is_split:
        tested = folders.require_test()
        train = _pairs(folders.train, bad) if choosing else []
        return train, _pairs(tested, bad), folders
    pairs, images = _pairs(folders.train, bad), folders.train / "images"
    # The layout may be images/train and masks/train, next to the test folders.
    within = find_folders(images, choosing=choosing, as_is=True)
    if not within.is_split or within.test is None:
        return pairs, None, folders
    train, test = (
        [pair for pair in pairs if pair.image.is_relative_to(part)]
        for part in (within.train, within.test)
    )
    return train, test, replace(folders, notes=within.notes)


def _pairs(directory: Path, bad: list[BadFile]) -> list[Pair]:
    """Match images and masks by name without suffix; add unmatched files to ``bad``."""
    images, masks = (_by_stem(directory / name, bad) for name in ("images", "masks"))
    if not images:
        raise DataError(f"{directory / 'images'}: expected images, found none")
    # Report each file for one reason: duplicates are not reported as unmatched, too.
    bad += [*_doubles(images), *_doubles(masks)]
    for mine, others, missing, folder in (
        (images, masks, "mask", "masks"),
        (masks, images, "image", "images"),
    ):
        bad += [
            BadFile(paths[0], f"there is no {missing} of that name in {directory / folder}")
            for stem, paths in mine.items()
            if stem not in others and len(paths) == 1
        ]
    return [
        Pair(paths[0], masks[stem][0])
        for stem, paths in images.items()
        if len(paths) == len(masks.get(stem, ())) == 1
    ]


def _doubles(by_stem: Mapping[str, Sequence[Path]]) -> list[BadFile]:
    """Report files that differ only in their suffix, so that it is unclear which one to use."""
    return [
        BadFile(path, f"expected one file of that name, there is {other.name} as well")
        for paths in by_stem.values()
        if len(paths) > 1
        for path, other in zip(paths, [*paths[1:], paths[0]], strict=True)
    ]


def _by_stem(directory: Path, bad: list[BadFile]) -> dict[str, list[Path]]:
    """Find images, and group them by their path without suffix."""
    if not directory.is_dir():
        raise DataError(
            f"{directory.parent}: expected the folders images and masks, but there is no "
            f"{directory.name}"
        )
    found: dict[str, list[Path]] = {}
    for path in picture_paths(directory, bad):
        found.setdefault(str(path.relative_to(directory).with_suffix("")), []).append(path)
    return found
