"""Reads pictures that lie in a folder for each class.

Either ``train/CLASS/...`` and ``test/CLASS/...``, or class folders alone, of which a share is held
out to test with. Pictures that come as arrays are read by `onefold.jobs.data.arrays`.
"""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import NamedTuple, TypeVar

import torch

from onefold.errors import DataError
from onefold.jobs.data.files import BadFile, digest_of, readable, refuse
from onefold.jobs.data.labels import Sample, check_labels, check_same, untested
from onefold.jobs.data.pictures import (
    Look,
    Mode,
    PictureData,
    PictureFiles,
    Pictures,
    picture_paths,
    sum_looks,
    visible_folders,
    white_of,
)
from onefold.jobs.data.scan import Scanning, Seen, deep_note, pack_scan, scan_pictures

__all__ = [
    "PictureClasses",
    "Split",
    "class_files",
    "digest",
    "hold_out",
    "read_folders",
    "test_folder",
]

_Item = TypeVar("_Item")


@dataclass(frozen=True, slots=True)
class Split:
    """The training or the test pictures."""

    pictures: Pictures
    labels: list[int]
    """Number of each picture's class."""

    def __len__(self) -> int:
        return len(self.labels)


@dataclass(frozen=True, slots=True, kw_only=True)
class PictureClasses(PictureData):
    """A data set of pictures with one label each."""

    train: Split
    test: Split
    classes: tuple[str, ...]
    """Names, by number."""
    mode: Mode
    """Mode that all pictures are converted to."""
    sizes: list[tuple[int, int]]
    """Width and height of the training pictures, in pixels."""


def digest(classes: Sequence[str], parts: Sequence[Sequence[Sample]]) -> str:
    """Digest the classes, and the name, the class and the content of every picture."""
    return digest_of(list(classes), *parts, size_bytes=16)


def hold_out(
    samples: Sequence[_Item], labels: Sequence[str], *, share: float, seed: int
) -> tuple[list[_Item], list[_Item]]:
    """Draw the samples to set aside: a share of each class, but at least one.

    A class of two or more keeps at least one to train with.

    Returns:
        The samples that remain, and those that were drawn, both in their order.
    """
    # A generator of its own, or a draw elsewhere would change which samples are held out, and a
    # resumed run would train on what the first one tested with.
    generator = torch.Generator().manual_seed(seed)
    by_label: dict[str, list[int]] = {}
    for number, label in enumerate(labels):
        by_label.setdefault(label, []).append(number)
    held: set[int] = set()
    # Sorted, so that the draws of a class do not depend on which class comes first in the list.
    for _, members in sorted(by_label.items()):
        count = min(max(1, round(share * len(members))), len(members) - 1)
        chosen = torch.randperm(len(members), generator=generator)[:count]
        held.update(members[i] for i in chosen.tolist())
    # Never in the order of the set: the numbers of samples seed their augmentation.
    kept = [sample for number, sample in enumerate(samples) if number not in held]
    return kept, [sample for number, sample in enumerate(samples) if number in held]


_TEST_NAMES = ("test", "val", "valid", "validation")
_IMAGE_FOLDERS = frozenset({"image", "images", "img", "imgs"})
_MASK_FOLDERS = frozenset({
    "annotations", "groundtruth", "gt", "label", "labels", "mask", "masks", "segmentation",
    "segmentations",
})  # fmt: skip


class _Picture(NamedTuple):
    """A picture of a class that can be read."""

    path: Path
    label: str
    seen: Seen[Look]


def read_folders(
    directory: Path,
    *,
    holdout: float,
    seed: int,
    skip_bad: bool,
    labels_as_is: bool = False,
    scanning: Scanning | None = None,
) -> PictureClasses:
    """Find the pictures in class folders, and read each once to see whether it can be.

    Args:
        directory: holds ``train`` and ``test`` (or ``val``) with a folder for each class, or the
            class folders themselves.
        holdout: share of each class that becomes the test set where there is none, 0 to 1.
        seed: seed of the generator that draws that share.
        skip_bad: leave out files that cannot be used, rather than refuse the data set.
        labels_as_is: accept the name of every folder as that of a class.
        scanning: what is known of the files already, and who watches; None for neither.

    Raises:
        DataError: the folder has no such layout, something in it cannot be used, or its folders
            are probably not classes.
    """
    train_folder = directory / "train"
    folders = [train_folder, test_folder(directory)] if train_folder.is_dir() else [directory]
    bad: list[BadFile] = []
    names: dict[str, str] = {}
    found = [class_files(folder, names, bad) for folder in folders]
    # Names are checked before the pictures are read, which may take minutes.
    where, counts = readable(directory), Counter(label for _, label in found[0])
    notes = [] if labels_as_is else check_labels(counts, where)
    parts = _looked_through(found, directory, scanning, bad)
    train, test = _divided(parts, readable(train_folder), bad, holdout=holdout, seed=seed)
    if not skip_bad:
        refuse(bad)
    # Of what can be used, or a class without a readable picture would keep a logit for nothing.
    # Sorted: the number of a class must not depend on the order in which a file system lists.
    classes = tuple(sorted({picture.label for picture in train}))
    _check_enough(directory, classes, train, test)
    looks = [picture.seen.look for picture in (*train, *test)]
    # Over both sets, so that a test picture is scaled as the training pictures are.
    white, grey = white_of(looks), all(look.grey for look in looks)
    samples = [
        [Sample(str(x.path.relative_to(directory)), x.label, x.seen.content) for x in part]
        for part in (train, test)
    ]
    numbers = {name: number for number, name in enumerate(classes)}
    train_split, test_split = (
        Split(
            PictureFiles([x.path for x in part], directory, white), [numbers[x.label] for x in part]
        )
        for part in (train, test)
    )
    return PictureClasses(
        train=train_split,
        test=test_split,
        classes=classes,
        mode="L" if grey else "RGB",
        sizes=[look.size for look in looks[: len(train)]],
        sums=sum_looks(looks[: len(train)], grey=grey),
        left_out=bad,
        white=white,
        notes=[
            *notes,
            *deep_note(looks),
            *untested(classes, {picture.label for picture in test}, where),
            *check_same(samples, where),
        ],
        scan=pack_scan([(x.path, x.seen) for x in (*train, *test)], directory),
        digest=digest(classes, samples),
    )


def test_folder(directory: Path) -> Path:
    """Find the folder beside ``train`` that holds the test set.

    Raises:
        DataError: no folder has one of the usual names.
    """
    for name in _TEST_NAMES:
        if (directory / name).is_dir():
            return directory / name
    raise DataError(
        f"{directory} has a folder train, and none of {', '.join(_TEST_NAMES)}: expected both, or "
        f"only class folders, of which --holdout sets a share aside"
    )


def _looked_through(
    found: Sequence[Sequence[tuple[Path, str]]],
    root: Path,
    scanning: Scanning | None,
    bad: list[BadFile],
) -> list[list[_Picture]]:
    """Return the readable pictures of each set; add the files that cannot be read to ``bad``."""
    # All sets in one scan: their pictures need one white, and their progress is one count.
    seen = iter(scan_pictures([path for part in found for path, _ in part], root, scanning))
    parts = []
    for part in found:
        looked_at = list(zip(part, islice(seen, len(part)), strict=True))
        parts.append([_Picture(*file, each) for file, each in looked_at if isinstance(each, Seen)])
        bad += [each for _, each in looked_at if isinstance(each, BadFile)]
    return parts


def _divided(
    parts: Sequence[list[_Picture]], where: str, bad: list[BadFile], *, holdout: float, seed: int
) -> tuple[list[_Picture], list[_Picture]]:
    """Return a training and a test set.

    Args:
        parts: the two sets, or one of which a share is held out.
        where: name of the training set's folder.
        bad: list to which the pictures that fit in neither are added.
        holdout: that share.
        seed: seed of the generator that draws it.
    """
    counts = Counter(picture.label for picture in parts[0])
    given = len(parts) == 2
    # Nothing is learnt about a class that has no training picture, and it takes a second one to
    # hold one out. Before the draw: what is held out depends on the position in the list, so with
    # --skip-bad the same pictures are drawn as if the unusable ones had never been there.
    least = 1 if given else 2
    known = [picture for picture in parts[-1] if counts[picture.label] >= least]
    for path, label, _ in parts[-1]:
        if counts[label] < least:
            strange = f"no picture of its class {label!r} in {where} can be used"
            alone = f"expected at least two pictures of class {label!r}, one of them to test with"
            bad.append(BadFile(path, strange if given else alone))
    if given:
        return parts[0], known
    return hold_out(known, [picture.label for picture in known], share=holdout, seed=seed)


def class_files(
    directory: Path, names: dict[str, str], bad: list[BadFile]
) -> list[tuple[Path, str]]:
    """Find all pictures below the class folders, and their classes, in the order of their paths.

    Args:
        directory: holds the class folders.
        names: the name of the folder of each class, of both sets; those of this one are added.
        bad: list to which what cannot be used is added.
    """
    if not directory.is_dir():
        raise DataError(f"{readable(directory)}: expected a folder with one folder for each class")
    folders = visible_folders(directory)
    if not folders:
        raise DataError(f"{readable(directory)}: expected a folder for each class, found none")
    _refuse_masks(directory, [folder.name for folder in folders])
    files = []
    for folder in folders:
        # A folder that could not be read has its entry already: it need not be called empty, too.
        before = len(bad)
        paths = picture_paths(folder, bad)
        if not paths and len(bad) == before:
            bad.append(BadFile(folder, "expected pictures of the class, found none"))
        label = _class_of(folder, names)
        files += [(path, label) for path in paths]
    return files


def _class_of(folder: Path, names: dict[str, str]) -> str:
    """Name the class of a folder; bytes that are not UTF-8 become text such as ``\\xe9``.

    Raises:
        DataError: a folder of another name would stand for a class of this name.
    """
    label = os.fsencode(folder.name).decode(errors="backslashreplace")
    # A folder may really be called "\\xe9" in ASCII, beside one whose name is the byte E9.
    other = names.setdefault(label, folder.name)
    if other != folder.name:
        raise DataError(
            f"{readable(folder.parent)}: expected names of classes that can be told apart, got "
            f"{os.fsencode(other)!r} and {os.fsencode(folder.name)!r}: give one of them another "
            f"name"
        )
    return label


def _refuse_masks(directory: Path, names: Sequence[str]) -> None:
    """Refuse a data set of pictures and masks, which would be learnt as two classes.

    Raises:
        DataError: one folder is named as pictures are, and one as masks are.
    """
    images = [name for name in names if name.lower() in _IMAGE_FOLDERS]
    masks = [name for name in names if name.lower() in _MASK_FOLDERS]
    if images and masks:
        data = directory.parent if directory.name == "train" else directory
        other = "" if {"images", "masks"} <= set(names) else " with folders named images and masks"
        raise DataError(
            f"{readable(directory)}: expected a folder for each class, got {images[0]} and "
            f"{masks[0]}, which look like pictures with a mask each: for these there is onefold "
            f"train segment --data {readable(data)}{other}"
        )


def _check_enough(
    directory: Path, classes: Sequence[str], train: Collection[_Picture], test: Collection[_Picture]
) -> None:
    if len(classes) < 2:
        listed = f"only {classes[0]!r}" if classes else "none"
        raise DataError(f"{directory}: expected pictures of two classes or more, found {listed}")
    if not train or not test:
        raise DataError(
            f"{directory}: expected pictures to train and to test with, found {len(train)} "
            f"and {len(test)}"
        )
