"""Data sets of pictures with one label each, in the layouts that users have.

A folder with ``train/CLASS/...`` and ``test/CLASS/...``; a folder of class folders, of which a
share is held out; the IDX files of MNIST and its relatives; scikit-learn's digits.
"""

from __future__ import annotations

import importlib.util
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import torch

from onefold.data.bad import BadFile, readable, refuse
from onefold.data.digest import digest_of
from onefold.data.idx import find_file, read_labelled
from onefold.data.pictures import (
    ArrayPictures,
    Look,
    Mode,
    PictureFiles,
    Pictures,
    Sums,
    scan_pictures,
    sum_looks,
)
from onefold.data.walk import is_visible_folder, picture_paths
from onefold.errors import DataError, LaunchError

__all__ = [
    "PictureClasses",
    "Split",
    "held_out",
    "read_digits",
    "read_folders",
    "read_idx_folder",
    "test_folder",
]

_TEST_NAMES = ("test", "val", "valid", "validation")
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

    @property
    def digest(self) -> str:
        """The same for the same pictures, by their names, sums and labels."""
        splits = [
            [[split.pictures.name(i) for i in range(len(split))], split.labels]
            for split in (self.train, self.test)
        ]
        return digest_of(splits, self.classes, self.sums.totals, self.sums.squares)


@dataclass(frozen=True, slots=True)
class _Found:
    """Files of class folders."""

    paths: list[Path]
    labels: list[str]
    bad: list[BadFile]


@dataclass(frozen=True, slots=True)
class _Sound:
    """Those that can be read."""

    paths: list[Path]
    labels: list[str]
    looks: list[Look]

    def only(self, kept: Sequence[int]) -> _Sound:
        return _Sound(
            [self.paths[i] for i in kept],
            [self.labels[i] for i in kept],
            [self.looks[i] for i in kept],
        )

    @property
    def grey(self) -> bool:
        return all(look.grey for look in self.looks)


def read_folders(directory: Path, *, holdout: float, seed: int, skip_bad: bool) -> PictureClasses:
    """Pictures in class folders; every picture is read once, to see whether it can be.

    Args:
        directory: holds ``train`` and ``test`` (or ``val``) with a folder for each class, or the
            class folders themselves.
        holdout: share of each class that becomes the test set where there is none.
        seed: draws that share.
        skip_bad: leave out what cannot be used; otherwise it is refused.

    Raises:
        DataError: the folder has no such layout, or something in it cannot be used.
    """
    train_folder = directory / "train"
    if train_folder.is_dir():
        train, test, bad = _given_parts(train_folder, test_folder(directory))
    else:
        whole, bad = _looked_through(_class_files(directory))
        held = held_out(whole.labels, share=holdout, seed=seed)
        train = whole.only([i for i in range(len(whole.labels)) if i not in held])
        test = whole.only(sorted(held))
    if not skip_bad:
        refuse(bad)
    classes = tuple(sorted(set(train.labels)))
    _check_enough(directory, classes, train, test)
    numbers = {name: number for number, name in enumerate(classes)}

    def split(part: _Sound) -> Split:
        files = PictureFiles(part.paths, directory)
        return Split(files, [numbers[label] for label in part.labels])

    return PictureClasses(
        train=split(train),
        test=split(test),
        classes=classes,
        mode=_MODE[train.grey and test.grey],
        sizes=[look.size for look in train.looks],
        sums=sum_looks(train.looks, grey=train.grey and test.grey),
        left_out=bad,
    )


def read_idx_folder(directory: Path, names: Sequence[str] | None = None) -> PictureClasses:
    """Grey pictures from MNIST's four IDX files.

    Args:
        directory: holds them, plain or as ``.gz``.
        names: of the classes; their numbers if None.

    Raises:
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
    classes = tuple(names) if names else tuple(map(str, range(count)))
    return _of_arrays(train_pixels, train_labels, test_pixels, test_labels, classes)


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
    return PictureClasses(
        train=Split(ArrayPictures(train_pixels, "training picture"), train_labels.tolist()),
        test=Split(ArrayPictures(test_pixels, "test picture"), test_labels.tolist()),
        classes=classes,
        mode="L",
        sizes=[(width, height)] * len(train_pixels),
        sums=sums,
        left_out=[],
    )


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


def _given_parts(train_folder: Path, test_folder: Path) -> tuple[_Sound, _Sound, list[BadFile]]:
    """The two sets, and what cannot be used of either, such as a test picture of no class."""
    train, train_bad = _looked_through(_class_files(train_folder))
    test, test_bad = _looked_through(_class_files(test_folder))
    classes = set(train.labels)
    strange = [
        BadFile(path, f"no picture of its class {label!r} in {readable(train_folder)} can be used")
        for path, label in zip(test.paths, test.labels, strict=True)
        if label not in classes
    ]
    known = [i for i, label in enumerate(test.labels) if label in classes]
    return train, test.only(known), [*train_bad, *test_bad, *strange]


def _class_files(directory: Path) -> _Found:
    """All pictures beneath the class folders, in the order of their paths."""
    if not directory.is_dir():
        raise DataError(f"{readable(directory)}: expected a folder with one folder for each class")
    found = _Found([], [], [])
    folders = sorted(path for path in directory.iterdir() if is_visible_folder(path))
    if not folders:
        raise DataError(f"{readable(directory)}: expected a folder for each class, found none")
    for folder in folders:
        before = len(found.bad)
        paths = picture_paths(folder, found.bad)
        if not paths and len(found.bad) == before:
            found.bad.append(BadFile(folder, "expected pictures of the class, found none"))
        found.paths.extend(paths)
        found.labels.extend([readable(Path(folder.name))] * len(paths))
    return found


def _looked_through(files: _Found) -> tuple[_Sound, list[BadFile]]:
    facts = scan_pictures(files.paths)
    paths = [files.paths[i] for i in facts.sound]
    labels = [files.labels[i] for i in facts.sound]
    return _Sound(paths, labels, facts.looks), [*files.bad, *facts.bad]


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


def _check_enough(directory: Path, classes: Sequence[str], train: _Sound, test: _Sound) -> None:
    if len(classes) < 2:
        listed = f"only {classes[0]!r}" if classes else "none"
        raise DataError(f"{directory}: expected pictures of two classes or more, found {listed}")
    if not train.paths or not test.paths:
        raise DataError(
            f"{directory}: expected pictures to train and to test with, found {len(train.paths)} "
            f"and {len(test.paths)}"
        )
