"""Data sets of pictures with one label each, in the layouts that users have.

A folder with ``train/CLASS/...`` and ``test/CLASS/...``; a folder of class folders, of which a
share is held out; the IDX files of MNIST and its relatives; scikit-learn's digits.
"""

from __future__ import annotations

import hashlib
import importlib.util
import os
from collections import Counter
from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

import torch

from onefold.data.bad import BadFile, readable, refuse
from onefold.data.digest import digest_of
from onefold.data.idx import find_file, read_labelled
from onefold.data.labels import check_labels
from onefold.data.overlap import check_apart, check_one_label
from onefold.data.pictures import (
    ArrayPictures,
    Look,
    Mode,
    PictureFiles,
    Pictures,
    Sums,
    sum_looks,
    white_of,
)
from onefold.data.scan import Scanning, Seen, deep_note, pack_scan, scan_pictures
from onefold.data.walk import is_visible_folder, picture_paths
from onefold.errors import DataError, LaunchError
from onefold.system.words import listed

__all__ = [
    "PictureClasses",
    "Split",
    "held_out",
    "read_digits",
    "read_folders",
    "read_idx_folder",
    "test_folder",
    "untested",
]

_TEST_NAMES = ("test", "val", "valid", "validation")
_IMAGE_FOLDERS = frozenset({"image", "images", "img", "imgs"})
_MASK_FOLDERS = frozenset({
    "annotations", "groundtruth", "gt", "label", "labels", "mask", "masks", "segmentation",
    "segmentations",
})  # fmt: skip
_MODE: dict[bool, Mode] = {True: "L", False: "RGB"}


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
    """Of all pictures."""
    sizes: list[tuple[int, int]]
    """Width and height of the training pictures, in pixels."""
    sums: Sums
    """Over the pixels of the training pictures."""
    left_out: list[BadFile]
    """What cannot be used."""
    white: int | None = None
    """Of pictures of more than 8 bits a pixel."""
    notes: list[str] = field(default_factory=list)
    """What to mention before training."""
    scan: str = ""
    """What was seen of the files, for `onefold.data.scan.read_scan`."""
    digest: str
    """The same for the same pictures under the same names, in the same classes and sets."""


@dataclass(frozen=True, slots=True)
class _Found:
    """Files of class folders."""

    paths: list[Path]
    labels: list[str]
    bad: list[BadFile]
    names: list[str]
    """Of the folders."""


@dataclass(frozen=True, slots=True)
class _Usable:
    """Those that can be read."""

    paths: list[Path]
    labels: list[str]
    seen: list[Seen]

    def only(self, kept: Sequence[int]) -> _Usable:
        return _Usable(
            [self.paths[i] for i in kept],
            [self.labels[i] for i in kept],
            [self.seen[i] for i in kept],
        )

    @property
    def looks(self) -> list[Look]:
        return [each.look for each in self.seen]

    def samples(self, root: Path) -> Iterator[tuple[str, str, str]]:
        """Name from the root, label and content of each."""
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
    """Pictures in class folders; every picture is read once, to see whether it can be.

    Args:
        directory: holds ``train`` and ``test`` (or ``val``) with a folder for each class, or the
            class folders themselves.
        holdout: share of each class that becomes the test set where there is none.
        seed: draws that share.
        skip_bad: leave out what cannot be used; otherwise it is refused.
        labels_as_is: accept the name of every folder as that of a class.
        scanning: how to look through the files.

    Raises:
        DataError: the folder has no such layout, something in it cannot be used, or its folders
            are probably not classes.
    """
    train_folder = directory / "train"
    given = train_folder.is_dir()
    found = [_class_files(train_folder if given else directory)]
    if given:
        found.append(_class_files(test_folder(directory)))
    _refuse_same_classes(directory, found)
    notes = [] if labels_as_is else check_labels(Counter(found[0].labels), readable(directory))
    usable, bad = _looked_through(found, directory, scanning)
    if given:
        train, test, strange = _given_parts(usable[0], usable[1], train_folder)
    else:
        train, test, strange = _held_parts(usable[0], holdout=holdout, seed=seed)
    bad = [*bad, *strange]
    if not skip_bad:
        refuse(bad)
    classes = tuple(sorted(set(train.labels)))
    _check_enough(directory, classes, train, test)
    looks = [*train.looks, *test.looks]
    white, grey = white_of(looks), all(look.grey for look in looks)
    splits = [_split(part, directory, classes, white) for part in (train, test)]
    return PictureClasses(
        train=splits[0],
        test=splits[1],
        classes=classes,
        mode=_MODE[grey],
        sizes=[look.size for look in train.looks],
        sums=sum_looks(train.looks, grey=grey),
        left_out=bad,
        white=white,
        notes=[
            *notes,
            *deep_note(looks),
            *untested(classes, set(test.labels), readable(directory)),
            *_apart(directory, train, test),
        ],
        scan=pack_scan([*train.paths, *test.paths], [*train.seen, *test.seen], directory),
        digest=_digest(classes, *([*part.samples(directory)] for part in (train, test))),
    )


def _digest(
    classes: Sequence[str],
    train: Sequence[tuple[str, str, str]],
    test: Sequence[tuple[str, str, str]],
) -> str:
    """Of the name, the class and the content of every picture."""
    return digest_of(list(classes), train, test, size_bytes=16)


def _split(part: _Usable, root: Path, classes: Sequence[str], white: int | None) -> Split:
    numbers = {name: number for number, name in enumerate(classes)}
    files = PictureFiles(part.paths, root, white)
    return Split(files, [numbers[label] for label in part.labels])


def _apart(directory: Path, train: _Usable, test: _Usable) -> list[str]:
    contents = [[each.content for each in part.seen] for part in (train, test)]
    names = [
        [readable(path.relative_to(directory)) for path in part.paths] for part in (train, test)
    ]
    labels = [*train.labels, *test.labels]
    return _notes_of_same(contents, names, labels, readable(directory))


def _notes_of_same(
    contents: Sequence[Sequence[str]],
    names: Sequence[Sequence[str]],
    labels: Sequence[object],
    where: str,
) -> list[str]:
    """What to mention of pictures that are there twice; contents and names of each set."""
    train, test = contents
    apart = check_apart(train, test, train_names=names[0], test_names=names[1], where=where)
    whole, all_names = ([*parts[0], *parts[1]] for parts in (contents, names))
    return [*apart, *check_one_label(whole, labels, all_names, where)]


def untested(classes: Sequence[str], tested: Collection[str], where: str) -> list[str]:
    """What to mention of classes that no test sample has."""
    missing = [name for name in classes if name not in tested]
    if not missing:
        return []
    note = (
        f"{where}: the test set has no sample of {len(missing)} of the {len(classes)} classes "
        f"({listed(missing)}): the score says nothing about them"
    )
    return [note]


def read_idx_folder(
    directory: Path, names: Sequence[str] | None = None, *, labels_as_is: bool = False
) -> PictureClasses:
    """Grey pictures from MNIST's four IDX files.

    Args:
        directory: holds them, plain or as ``.gz``.
        names: of the classes; their numbers if None.
        labels_as_is: accept every label as a class, however many there are.

    Raises:
        DataError: the labels are probably not classes.
        FileNotFoundError: a file is missing.
        ValueError: a file is damaged, or there are fewer than two classes.
    """
    train_pixels, train_labels = read_labelled(directory, "train")
    test_pixels, test_labels = read_labelled(directory, "t10k")
    count = int(train_labels.max()) + 1
    labels_path = find_file(directory, "train-labels-idx1-ubyte")
    if count < 2:
        raise DataError(f"{labels_path}: expected two classes or more, found only 0")
    if names and count > len(names):
        raise DataError(f"{labels_path}: expected labels 0 to {len(names) - 1}, got {count - 1}")
    if int(test_labels.max()) >= count:
        raise DataError(
            f"{find_file(directory, 't10k-labels-idx1-ubyte')}: expected labels of the training "
            f"set, 0 to {count - 1}, got {int(test_labels.max())}"
        )
    counts = Counter(map(str, train_labels.tolist()))
    notes = [] if labels_as_is else check_labels(counts, readable(labels_path))
    classes = tuple(names) if names else tuple(map(str, range(count)))
    data = _of_arrays(train_pixels, train_labels, test_pixels, test_labels, classes)
    tested = {classes[label] for label in data.test.labels}
    notes += untested(classes, tested, readable(directory))
    return replace(data, notes=notes + _arrays_apart(data, readable(directory)))


def read_digits(*, holdout: float, seed: int) -> PictureClasses:
    """The 1,797 digits of 8x8 pixels that come with scikit-learn.

    Args:
        holdout: share of each class that becomes the test set.
        seed: draws that share.

    Raises:
        LaunchError: scikit-learn is not installed.
    """
    if importlib.util.find_spec("sklearn") is None:
        raise LaunchError(
            "the digits come with scikit-learn, which is not installed here: "
            'pip install "onefold[demo]"'
        )
    from sklearn.datasets import load_digits

    source = load_digits()
    pixels = torch.from_numpy(source.images * (255 / 16)).to(torch.uint8)
    labels = torch.from_numpy(source.target).to(torch.int64)
    held = held_out([str(label) for label in labels.tolist()], share=holdout, seed=seed)
    test = torch.tensor(sorted(held))
    train = torch.tensor([i for i in range(len(labels)) if i not in held])
    classes = tuple(map(str, range(10)))
    return _of_arrays(pixels[train], labels[train], pixels[test], labels[test], classes)


def _of_arrays(
    train_pixels: torch.Tensor,
    train_labels: torch.Tensor,
    test_pixels: torch.Tensor,
    test_labels: torch.Tensor,
    classes: tuple[str, ...],
) -> PictureClasses:
    sums = Sums()
    sums.add(train_pixels.unsqueeze(-1).numpy())
    height, width = train_pixels.shape[1:]
    train = Split(ArrayPictures(train_pixels, "training picture"), train_labels.tolist())
    test = Split(ArrayPictures(test_pixels, "test picture"), test_labels.tolist())
    return PictureClasses(
        train=train,
        test=test,
        digest=_digest(classes, *(list(_array_samples(part, classes)) for part in (train, test))),
        classes=classes,
        mode="L",
        sizes=[(width, height)] * len(train_pixels),
        sums=sums,
        left_out=[],
    )


def _arrays_apart(data: PictureClasses, where: str) -> list[str]:
    samples = [list(_array_samples(part, data.classes)) for part in (data.train, data.test)]
    return _notes_of_same(
        [[content for _, _, content in part] for part in samples],
        [[name for name, _, _ in part] for part in samples],
        [label for part in samples for _, label, _ in part],
        where,
    )


def _array_samples(split: Split, classes: Sequence[str]) -> Iterator[tuple[str, str, str]]:
    """Name, label and content of each."""
    for number, label in enumerate(split.labels):
        pixels = split.pictures[number].tobytes()
        content = hashlib.blake2b(pixels, digest_size=16).hexdigest()
        yield split.pictures.name(number), classes[label], content


def test_folder(directory: Path) -> Path:
    """The folder beside ``train`` that holds the test set.

    Raises:
        DataError: there is none.
    """
    for name in _TEST_NAMES:
        if (directory / name).is_dir():
            return directory / name
    raise DataError(
        f"{directory} has a folder train, and none of {', '.join(_TEST_NAMES)}: expected both, or "
        f"only class folders, of which --holdout sets a share aside"
    )


def _given_parts(
    train: _Usable, test: _Usable, train_folder: Path
) -> tuple[_Usable, _Usable, list[BadFile]]:
    """The two sets, and what cannot be used of the test set: pictures of no class."""
    classes = set(train.labels)
    strange = [
        BadFile(path, f"no picture of its class {label!r} in {readable(train_folder)} can be used")
        for path, label in zip(test.paths, test.labels, strict=True)
        if label not in classes
    ]
    known = [i for i, label in enumerate(test.labels) if label in classes]
    return train, test.only(known), strange


def _held_parts(
    whole: _Usable, *, holdout: float, seed: int
) -> tuple[_Usable, _Usable, list[BadFile]]:
    """The two sets, and what cannot be used: a class of a single picture has none to test with."""
    counts = Counter(whole.labels)
    alone = [
        BadFile(
            path, f"expected at least two pictures of class {label!r}, one of them to test with"
        )
        for path, label in zip(whole.paths, whole.labels, strict=True)
        if counts[label] == 1
    ]
    kept = [i for i, label in enumerate(whole.labels) if counts[label] > 1]
    whole = whole.only(kept)
    held = held_out(whole.labels, share=holdout, seed=seed)
    train = whole.only([i for i in range(len(whole.labels)) if i not in held])
    return train, whole.only(sorted(held)), alone


def _class_files(directory: Path) -> _Found:
    """All pictures beneath the class folders, in the order of their paths."""
    if not directory.is_dir():
        raise DataError(f"{readable(directory)}: expected a folder with one folder for each class")
    folders = sorted(path for path in directory.iterdir() if is_visible_folder(path))
    found = _Found([], [], [], [folder.name for folder in folders])
    if not folders:
        raise DataError(f"{readable(directory)}: expected a folder for each class, found none")
    _refuse_masks(directory, [folder.name for folder in folders])
    for folder in folders:
        before = len(found.bad)
        paths = picture_paths(folder, found.bad)
        if not paths and len(found.bad) == before:
            found.bad.append(BadFile(folder, "expected pictures of the class, found none"))
        found.paths.extend(paths)
        found.labels.extend([_class_of(folder.name)] * len(paths))
    return found


def _class_of(name: str) -> str:
    """The class of a folder of that name: bytes that are no UTF-8 are written as ``\\xe9``."""
    return os.fsencode(name).decode(errors="backslashreplace")


def _refuse_same_classes(directory: Path, found: Sequence[_Found]) -> None:
    """Refuse two folders whose names are not the same, and would be written the same way.

    Raises:
        DataError: there are two.
    """
    first: dict[str, str] = {}
    for name in sorted({name for files in found for name in files.names}):
        other = first.setdefault(_class_of(name), name)
        if other != name:
            raise DataError(
                f"{readable(directory)}: expected names of classes that can be told apart, got "
                f"{os.fsencode(other)!r} and {os.fsencode(name)!r}: give one of them another name"
            )


def _refuse_masks(directory: Path, names: Sequence[str]) -> None:
    """Refuse pictures and their masks, which would be learnt as two classes.

    Raises:
        DataError: the folders are named so.
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
    """Of each set what can be read, all looked through at once; and what cannot be used."""
    paths = [path for files in found for path in files.paths]
    facts = scan_pictures(paths, root, scanning)
    usable, start = [], 0
    bad_files = {bad.path: bad for bad in facts.bad}
    bad: list[BadFile] = []
    for files in found:
        end = start + len(files.paths)
        rows = [(n, row) for row, n in enumerate(facts.sound) if start <= n < end]
        usable.append(
            _Usable(
                [paths[n] for n, _ in rows],
                [files.labels[n - start] for n, _ in rows],
                [facts.seen[row] for _, row in rows],
            )
        )
        bad += [*files.bad, *(bad_files[path] for path in files.paths if path in bad_files)]
        start = end
    return usable, bad


def held_out(labels: Sequence[str], *, share: float, seed: int) -> set[int]:
    """Numbers of the samples to set aside: the same share of each class, one at the least."""
    generator = torch.Generator().manual_seed(seed)
    by_label: dict[str, list[int]] = {}
    for number, label in enumerate(labels):
        by_label.setdefault(label, []).append(number)
    held: set[int] = set()
    for _, members in sorted(by_label.items()):
        count = min(max(1, round(share * len(members))), len(members) - 1)
        chosen = torch.randperm(len(members), generator=generator)[:count]
        held.update(members[i] for i in chosen.tolist())
    return held


def _check_enough(directory: Path, classes: Sequence[str], train: _Usable, test: _Usable) -> None:
    if len(classes) < 2:
        listed = f"only {classes[0]!r}" if classes else "none"
        raise DataError(f"{directory}: expected pictures of two classes or more, found {listed}")
    if not train.paths or not test.paths:
        raise DataError(
            f"{directory}: expected pictures to train and to test with, found {len(train.paths)} "
            f"and {len(test.paths)}"
        )
