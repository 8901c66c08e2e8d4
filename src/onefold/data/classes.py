"""Reads pictures that lie in a folder for each class.

Either ``train/CLASS/...`` and ``test/CLASS/...``, or class folders alone, of which a share is held
out to test with. Pictures that come as arrays are read by `onefold.data.arrays`.
"""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from onefold.data.bad import BadFile, readable, refuse
from onefold.data.labels import check_labels
from onefold.data.pictures import (
    Look,
    Mode,
    PictureFiles,
    picture_paths,
    sum_looks,
    visible_folders,
    white_of,
)
from onefold.data.scan import Scanning, Seen, deep_note, pack_scan, scan_pictures
from onefold.data.splits import PictureClasses, Split, digest, held_out, notes_of_same, untested
from onefold.errors import DataError

__all__ = ["read_folders", "test_folder"]

_TEST_NAMES = ("test", "val", "valid", "validation")
_IMAGE_FOLDERS = frozenset({"image", "images", "img", "imgs"})
_MASK_FOLDERS = frozenset({
    "annotations", "groundtruth", "gt", "label", "labels", "mask", "masks", "segmentation",
    "segmentations",
})  # fmt: skip
_MODE: dict[bool, Mode] = {True: "L", False: "RGB"}


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
    given = train_folder.is_dir()
    found = [_class_files(train_folder if given else directory)]
    if given:
        found.append(_class_files(test_folder(directory)))
    # Names are checked before the pictures are read, which may take minutes.
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
    # Of what can be used, or a class without a readable picture would keep a logit for nothing.
    # Sorted: the number of a class must not depend on the order in which a file system lists.
    classes = tuple(sorted(set(train.labels)))
    _check_enough(directory, classes, train, test)
    looks = [*train.looks, *test.looks]
    # Over both sets, so that a test picture is scaled as the training pictures are.
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
        digest=digest(classes, *([*part.samples(directory)] for part in (train, test))),
    )


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
    return notes_of_same(contents, names, labels, readable(directory))


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


def _given_parts(
    train: _Usable, test: _Usable, train_folder: Path
) -> tuple[_Usable, _Usable, list[BadFile]]:
    """Return the two sets, and the test pictures whose class has no training picture."""
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
    """Divide the pictures in two sets; a class of a single picture has none to test with."""
    counts = Counter(whole.labels)
    alone = [
        BadFile(
            path, f"expected at least two pictures of class {label!r}, one of them to test with"
        )
        for path, label in zip(whole.paths, whole.labels, strict=True)
        if counts[label] == 1
    ]
    kept = [i for i, label in enumerate(whole.labels) if counts[label] > 1]
    # Only now: what is held out depends on the position in the list, so with --skip-bad the same
    # pictures are drawn as if the unusable ones had never been there.
    whole = whole.only(kept)
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
    usable, start = [], 0
    bad_files = {bad.path: bad for bad in facts.bad}
    bad: list[BadFile] = []
    for files in found:
        end = start + len(files.paths)
        # n counts all paths of all sets, and row the readable ones among them.
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


def _check_enough(directory: Path, classes: Sequence[str], train: _Usable, test: _Usable) -> None:
    if len(classes) < 2:
        listed = f"only {classes[0]!r}" if classes else "none"
        raise DataError(f"{directory}: expected pictures of two classes or more, found {listed}")
    if not train.paths or not test.paths:
        raise DataError(
            f"{directory}: expected pictures to train and to test with, found {len(train.paths)} "
            f"and {len(test.paths)}"
        )
