"""Reads pictures that lie in a folder for each class.

Either ``train/CLASS/...`` and ``test/CLASS/...``, or class folders alone, of which a share is held
out to test with. Pictures that come as arrays are read by `onefold.jobs.data.arrays`.
"""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import dataclass, field
from itertools import chain
from pathlib import Path
from typing import TypeAlias

import torch

from onefold.errors import DataError
from onefold.jobs.data.files import BadFile, digest_of, readable, refuse
from onefold.jobs.data.labels import check_apart, check_labels, check_one_label, untested
from onefold.jobs.data.pictures import (
    Look,
    Mode,
    PictureFiles,
    Pictures,
    Sums,
    picture_paths,
    sum_looks,
    visible_folders,
    white_of,
)
from onefold.jobs.data.scan import Scanning, Seen, deep_note, pack_scan, scan_pictures

__all__ = [
    "PictureClasses",
    "Sample",
    "Split",
    "digest",
    "held_out",
    "notes_of_same",
    "read_folders",
    "test_folder",
]


@dataclass(frozen=True, slots=True)
class Split:
    """The training or the test pictures."""

    pictures: Pictures
    labels: list[int]
    """Number of each picture's class."""

    def __len__(self) -> int:
        return len(self.labels)


@dataclass(frozen=True, slots=True, kw_only=True)
class PictureClasses:
    """A data set of pictures with one label each."""

    train: Split
    test: Split
    classes: tuple[str, ...]
    """Names, by number."""
    mode: Mode
    """Mode that all pictures are converted to."""
    sizes: list[tuple[int, int]]
    """Width and height of the training pictures, in pixels."""
    sums: Sums
    """Sums over the pixels of the training pictures."""
    left_out: list[BadFile]
    """Files that cannot be used."""
    white: int | None = None
    """White of pictures of more than 8 bits a pixel; None if there are none."""
    notes: list[str] = field(default_factory=list)
    """What to mention before training."""
    scan: str = ""
    """What was seen of the files, as `onefold.jobs.data.scan.unpack_scan` reads it."""
    digest: str
    """The same for the same pictures under the same names, in the same classes and sets."""


Sample: TypeAlias = tuple[str, str, str]
"""The name of a picture, its label, and a digest of its content."""


def digest(classes: Sequence[str], parts: Sequence[Sequence[Sample]]) -> str:
    """Digest the classes, and the name, the class and the content of every picture."""
    return digest_of(list(classes), *parts, size_bytes=16)


def notes_of_same(parts: Sequence[Sequence[Sample]], where: str) -> list[str]:
    """Mention pictures that occur twice, in one set or in both; the parts are training and test."""
    names = [[readable(Path(name)) for name, _, _ in part] for part in parts]
    contents = [[content for _, _, content in part] for part in parts]
    labels = [label for part in parts for _, label, _ in part]
    return [
        *check_apart(*contents, train_names=names[0], test_names=names[1], where=where),
        *check_one_label([*chain(*contents)], labels, [*chain(*names)], where),
    ]


def held_out(labels: Sequence[str], *, share: float, seed: int) -> set[int]:
    """Draw the positions of the samples to set aside: a share of each class, but at least one.

    A class of two or more keeps at least one to train with.
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
    return held


_TEST_NAMES = ("test", "val", "valid", "validation")
_IMAGE_FOLDERS = frozenset({"image", "images", "img", "imgs"})
_MASK_FOLDERS = frozenset({
    "annotations", "groundtruth", "gt", "label", "labels", "mask", "masks", "segmentation",
    "segmentations",
})  # fmt: skip


@dataclass(frozen=True, slots=True)
class _Found:
    """The files of one set of class folders."""

    paths: list[Path]
    labels: list[str]
    bad: list[BadFile]
    names: list[str]
    """Names of the folders."""


@dataclass(frozen=True, slots=True)
class _Usable:
    """The files of a set that can be read; the lists have one entry for each, in one order."""

    paths: list[Path]
    labels: list[str]
    seen: list[Seen[Look]]

    def only(self, kept: Sequence[int]) -> _Usable:
        return _Usable(
            [self.paths[i] for i in kept],
            [self.labels[i] for i in kept],
            [self.seen[i] for i in kept],
        )

    @property
    def looks(self) -> list[Look]:
        return [each.look for each in self.seen]

    def split(self, root: Path, classes: Sequence[str], white: int | None) -> Split:
        numbers = {name: number for number, name in enumerate(classes)}
        files = PictureFiles(self.paths, root, white)
        return Split(files, [numbers[label] for label in self.labels])

    def samples(self, root: Path) -> Iterator[Sample]:
        """Yield name below the root, label, and digest of the content of each picture."""
        for path, label, seen in zip(self.paths, self.labels, self.seen, strict=True):
            yield str(path.relative_to(root)), label, seen.content


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
    if train_folder.is_dir():
        found = [_class_files(train_folder), _class_files(test_folder(directory))]
    else:
        found = [_class_files(directory)]
    # Names are checked before the pictures are read, which may take minutes.
    _refuse_same_classes(directory, found)
    notes = [] if labels_as_is else check_labels(Counter(found[0].labels), readable(directory))
    usable, bad = _looked_through(found, directory, scanning)
    train, test, strange = _divided(usable, readable(train_folder), holdout=holdout, seed=seed)
    bad += strange
    if not skip_bad:
        refuse(bad)
    # Of what can be used, or a class without a readable picture would keep a logit for nothing.
    # Sorted: the number of a class must not depend on the order in which a file system lists.
    classes = tuple(sorted(set(train.labels)))
    _check_enough(directory, classes, train, test)
    looks = [*train.looks, *test.looks]
    # Over both sets, so that a test picture is scaled as the training pictures are.
    white, grey = white_of(looks), all(look.grey for look in looks)
    where, samples = readable(directory), [[*part.samples(directory)] for part in (train, test)]
    splits = [part.split(directory, classes, white) for part in (train, test)]
    return PictureClasses(
        train=splits[0],
        test=splits[1],
        classes=classes,
        mode="L" if grey else "RGB",
        sizes=[look.size for look in train.looks],
        sums=sum_looks(train.looks, grey=grey),
        left_out=bad,
        white=white,
        notes=[
            *notes,
            *deep_note(looks),
            *untested(classes, set(test.labels), where),
            *notes_of_same(samples, where),
        ],
        scan=pack_scan([*train.paths, *test.paths], [*train.seen, *test.seen], directory),
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


def _of_classes(
    part: _Usable, classes: Collection[str], reason: Callable[[str], str]
) -> tuple[_Usable, list[BadFile]]:
    """Return the pictures of some classes, and why the others cannot be used."""
    bad = [
        BadFile(path, reason(label))
        for path, label in zip(part.paths, part.labels, strict=True)
        if label not in classes
    ]
    return part.only([i for i, label in enumerate(part.labels) if label in classes]), bad


def _divided(
    usable: Sequence[_Usable], where: str, *, holdout: float, seed: int
) -> tuple[_Usable, _Usable, list[BadFile]]:
    """Return a training and a test set, and the pictures that fit in neither.

    Args:
        usable: the two sets, or one of which a share is held out.
        where: name of the training set's folder.
        holdout: that share.
        seed: seed of the generator that draws it.
    """
    if len(usable) == 2:
        train, test = usable
        # Nothing is learnt about a class that has no training picture.
        known, strange = _of_classes(
            test,
            set(train.labels),
            lambda x: f"no picture of its class {x!r} in {where} can be used",
        )
        return train, known, strange
    counts = Counter(usable[0].labels)
    # Before the draw: what is held out depends on the position in the list, so with --skip-bad the
    # same pictures are drawn as if the unusable ones had never been there.
    whole, alone = _of_classes(
        usable[0],
        {label for label, count in counts.items() if count > 1},
        lambda x: f"expected at least two pictures of class {x!r}, one of them to test with",
    )
    held = held_out(whole.labels, share=holdout, seed=seed)
    train = whole.only([i for i in range(len(whole.labels)) if i not in held])
    return train, whole.only(sorted(held)), alone


def _class_files(directory: Path) -> _Found:
    """Find all pictures below the class folders, in the order of their paths."""
    if not directory.is_dir():
        raise DataError(f"{readable(directory)}: expected a folder with one folder for each class")
    folders = visible_folders(directory)
    found = _Found([], [], [], [folder.name for folder in folders])
    if not folders:
        raise DataError(f"{readable(directory)}: expected a folder for each class, found none")
    _refuse_masks(directory, [folder.name for folder in folders])
    for folder in folders:
        # A folder that could not be read has its entry already: it need not be called empty, too.
        before = len(found.bad)
        paths = picture_paths(folder, found.bad)
        if not paths and len(found.bad) == before:
            found.bad.append(BadFile(folder, "expected pictures of the class, found none"))
        found.paths.extend(paths)
        found.labels.extend([_class_of(folder.name)] * len(paths))
    return found


def _class_of(name: str) -> str:
    """Name the class of a folder; bytes that are not UTF-8 become text such as ``\\xe9``."""
    return os.fsencode(name).decode(errors="backslashreplace")


def _refuse_same_classes(directory: Path, found: Sequence[_Found]) -> None:
    """Refuse folders of different names that would stand for classes of one name.

    Raises:
        DataError: two folders have names that `_class_of` cannot tell apart.
    """
    # A folder may really be called "\\xe9" in ASCII, beside one whose name is the byte E9.
    first: dict[str, str] = {}
    for name in sorted({name for files in found for name in files.names}):
        other = first.setdefault(_class_of(name), name)
        if other != name:
            raise DataError(
                f"{readable(directory)}: expected names of classes that can be told apart, got "
                f"{os.fsencode(other)!r} and {os.fsencode(name)!r}: give one of them another name"
            )


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


def _looked_through(
    found: Sequence[_Found], root: Path, scanning: Scanning | None
) -> tuple[list[_Usable], list[BadFile]]:
    """Return the readable pictures of each set, and all files that cannot be used."""
    # All sets in one scan: their pictures need one white, and their progress is one count.
    paths = [path for files in found for path in files.paths]
    facts = scan_pictures(paths, root, scanning)
    seen = {paths[n]: each for n, each in zip(facts.sound, facts.seen, strict=True)}
    bad_files = {bad.path: bad for bad in facts.bad}
    usable: list[_Usable] = []
    bad: list[BadFile] = []
    for files in found:
        kept = [n for n, path in enumerate(files.paths) if path in seen]
        read = [files.paths[n] for n in kept]
        usable.append(_Usable(read, [files.labels[n] for n in kept], [seen[path] for path in read]))
        bad += [*files.bad, *(bad_files[path] for path in files.paths if path in bad_files)]
    return usable, bad


def _check_enough(directory: Path, classes: Sequence[str], train: _Usable, test: _Usable) -> None:
    if len(classes) < 2:
        listed = f"only {classes[0]!r}" if classes else "none"
        raise DataError(f"{directory}: expected pictures of two classes or more, found {listed}")
    if not train.paths or not test.paths:
        raise DataError(
            f"{directory}: expected pictures to train and to test with, found {len(train.paths)} "
            f"and {len(test.paths)}"
        )
