"""Reads labeled images from class folders or from tables of paths.

Folders are either ``train/CLASS/...`` and ``test/CLASS/...``, or only class folders, of which a
fraction is held out for testing. `onefold_jobs.data.arrays` reads images that are stored as arrays.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import islice
from pathlib import Path
from typing import Any, NamedTuple

from onefold.errors import DataError
from onefold_jobs.data.files import BadFile, digest_of, name_below, readable, refuse
from onefold_jobs.data.folds import Fold, unused
from onefold_jobs.data.labels import (
    Label,
    Sample,
    TaskName,
    check_same,
    check_task,
    numbered,
    parts_of,
    read_label,
    shortened,
    untested,
)
from onefold_jobs.data.pictures import (
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
from onefold_jobs.data.samples import ListedSamples, hold_out, require_two, strata
from onefold_jobs.data.scan import Scanning, Seen, by_one_white, notes_of, pack_scan, scan_pictures
from onefold_jobs.data.splits import find_folders, refuse_masks
from onefold_jobs.data.tables import Line

__all__ = [
    "PictureClasses",
    "Split",
    "class_files",
    "digest",
    "listed_files",
    "read_classes",
]


@dataclass(frozen=True, slots=True)
class Split:
    """The training or the test images."""

    pictures: Pictures
    labels: Sequence[Any]
    """Label of each image, as returned by `numbered`."""

    def __len__(self) -> int:
        return len(self.labels)


@dataclass(frozen=True, slots=True, kw_only=True)
class PictureClasses(PictureData):
    """A dataset of labeled images."""

    train: Split
    test: Split
    classes: tuple[str, ...]
    """Class names, by number."""
    mode: Mode
    """Mode that all images are converted to."""
    sizes: list[tuple[int, int]]
    """Width and height of the training images, in pixels."""


def digest(classes: Sequence[str], parts: Sequence[Sequence[Sample]]) -> str:
    """Compute a digest of the classes, and of name, class and content of every image."""
    without_places = ([each[:3] for each in part] for part in parts)
    return digest_of(list(classes), *without_places, size_bytes=16)


class _Picture(NamedTuple):
    """A readable image with its class."""

    path: Path
    label: Label
    place: str
    """Line and table that list it; empty if it is in a class folder."""
    seen: Seen[Look]


def read_classes(
    source: Path | ListedSamples,
    *,
    holdout: float,
    seed: int,
    skip_bad: bool,
    task: TaskName = "single-label",
    labels_as_is: bool = False,
    scanning: Scanning | None = None,
    fold: Fold | None = None,
) -> PictureClasses:
    """Find images and their labels, and read each image once to check it.

    Args:
        source: a folder with a training and a test set, as `find_folders` finds them, or with the
            class folders themselves; or the rows of tables, with paths as in `listed_files`.
        holdout: fraction of each class for the test set, if there is none, 0 to 1.
        seed: seed of the generator that draws the test set.
        skip_bad: skip unusable files instead of rejecting the dataset.
        task: type of the labels; for ``regression``, the names of class folders are numbers.
        labels_as_is: accept all labels as class names.
        scanning: known files and a progress callback; None for neither.
        fold: fold of the training set to test on, instead of a test set.

    Raises:
        DataError: the folder has no such layout, something in it cannot be used, or the labels
            probably do not fit the task.
    """
    bad: list[BadFile] = []
    notes, columns = [], None
    if isinstance(source, ListedSamples):
        bad, notes, columns = [*source.bad], source.notes, source.columns
        directory, where = source.paths[0].parent, source.paths[0]
        trained = where
        given = source.test
        if fold and given is not None:
            given, notes = None, [*notes, unused(source.paths[1])]
        sets = zip([source.train, given], source.paths, strict=True)
        found = [
            [
                (file, line.label, f"line {line.line_number} of {path.name}")
                for file, line in listed_files(lines, path, bad)
            ]
            for lines, path in sets
            if lines is not None
        ]
    else:
        directory = where = source
        folders = find_folders(source, as_is=labels_as_is)
        trained, notes = folders.train, folders.notes
        sources = [trained]
        if folders.is_split and not fold:
            sources.append(folders.require_test())
        elif folders.test:
            notes = [*notes, unused(folders.test)]
        names: dict[str, str] = {}
        found = [
            [(*each, "") for each in class_files(folder, names, bad, task)] for folder in sources
        ]
    # Check labels before reading images, which may take minutes.
    labels = [label for _, label, _ in found[0]]
    notes = [*notes, *check_task(labels, task, readable(where), labels_as_is=labels_as_is)]
    parts = _looked_through(found, directory, scanning, bad)
    if len(parts) == 1:
        how: Any = {"share": holdout, "seed": seed, "fold": fold}
        of_class = strata([x.label for x in parts[0]])
        parts = [*hold_out(parts[0], of_class, **how, content=lambda x: x.seen.content)]
    white = white_of(picture.seen.look for picture in parts[0])
    train, test = (by_one_white(part, white, bad) for part in parts)
    test = _learned(train, test, readable(trained), bad)
    if not skip_bad:
        refuse(bad, [*train, *test] if train else [])
    # Use only readable images, or a class without one would keep a useless logit. Sorted, because
    # the number of a class must not depend on the order in which the file system lists folders.
    classes = tuple(sorted({name for picture in train for name in parts_of(picture.label)}))
    require_two([picture.label for picture in train], directory, bad)
    if not test:
        raise DataError(f"{readable(directory)}: expected test images, found none")
    data = _of_pictures(directory, classes, train, test, bad, notes, readable(where))
    return replace(data, columns=columns, own_test=len(found) > 1)


def _of_pictures(
    directory: Path,
    classes: tuple[str, ...],
    train: Sequence[_Picture],
    test: Sequence[_Picture],
    bad: list[BadFile],
    notes: Sequence[str],
    where: str,
) -> PictureClasses:
    looks = [picture.seen.look for picture in (*train, *test)]
    white, gray = white_of(looks[: len(train)]), all(look.gray for look in looks)
    samples = [
        [Sample(name_below(x.path, directory), x.label, x.seen.content, x.place) for x in part]
        for part in (train, test)
    ]
    train_split, test_split = (
        Split(
            PictureFiles([x.path for x in part], directory, white),
            numbered([x.label for x in part], classes),
        )
        for part in (train, test)
    )
    tested = {name for picture in test for name in parts_of(picture.label)}
    return PictureClasses(
        train=train_split,
        test=test_split,
        classes=classes,
        mode="L" if gray else "RGB",
        sizes=[look.size for look in looks[: len(train)]],
        sums=sum_looks(looks[: len(train)], gray=gray),
        left_out=bad,
        white=white,
        notes=[
            *notes,
            *notes_of(looks, len(train)),
            *untested(classes, tested, where),
            *check_same(samples, where),
        ],
        scan=pack_scan([(x.path, x.seen) for x in (*train, *test)], directory),
        digest=digest(classes, samples),
    )


def listed_files(lines: Sequence[Line], table: Path, bad: list[BadFile]) -> list[tuple[Path, Line]]:
    """Find the images that the rows of a table refer to, with their rows.

    Args:
        lines: the rows. Paths are relative to the table's folder, or to the folder around it; a
            bare name, with or without suffix, may refer to a single image anywhere below the first.
        table: path of the table.
        bad: list that receives rows without an image.
    """
    by_name: dict[str, list[Path]] = {}
    files: list[tuple[Path, Line]] = []
    roots = (table.parent, table.parent / os.pardir)
    for line in lines:
        # Windows writes paths with backslashes.
        texts = dict.fromkeys((line.text, line.text.replace("\\", "/")))
        tried = [root / text for root in roots for text in texts]
        path = next(filter(Path.is_file, tried), tried[0])
        if not path.is_file() and Path(line.text).name == line.text:
            # Search once, and only for bare names, as in tables of competitions.
            if not by_name:
                for each in picture_paths(table.parent, bad):
                    for name in {each.name, each.stem}:
                        by_name.setdefault(name, []).append(each)
            paths = by_name.get(line.text, [path])
            if len(paths) > 1:
                several = f"{len(paths)} have that name, such as {readable(paths[0])}"
                reason = f"expected the path of one image, got {shortened(line.text)}: {several}"
                bad.append(BadFile(table, reason, line.line_number))
                continue
            path = paths[0]
        if path.is_file():
            files.append((path, line))
        else:
            missing = (Path(os.path.normpath(each)) for each in (path, tried[-1]))
            places = " or ".join(dict.fromkeys(map(readable, missing)))
            reason = f"expected an image at {places}, got none"
            bad.append(BadFile(table, reason, line.line_number))
    return files


def _looked_through(
    found: Sequence[Sequence[tuple[Path, Label, str]]],
    root: Path,
    scanning: Scanning | None,
    bad: list[BadFile],
) -> list[list[_Picture]]:
    """Return the readable images of each set; add unreadable files to ``bad``."""
    # Scan all sets together, so that the progress is one count.
    seen = iter(scan_pictures([path for part in found for path, *_ in part], root, scanning))
    parts = []
    for part in found:
        looked_at = list(zip(part, islice(seen, len(part)), strict=True))
        parts.append([_Picture(*file, each) for file, each in looked_at if isinstance(each, Seen)])
        bad += [each for _, each in looked_at if isinstance(each, BadFile)]
    return parts


def _learned(
    train: Sequence[_Picture], test: Sequence[_Picture], where: str, bad: list[BadFile]
) -> list[_Picture]:
    """Return the test images whose classes have training images; add the others to ``bad``."""
    learned = {name for picture in train for name in parts_of(picture.label)}
    known = []
    for picture in test:
        others = [name for name in parts_of(picture.label) if name not in learned]
        if others:
            reason = f"no usable image of its class {others[0]!r} in {where}"
            bad.append(BadFile(picture.path, reason))
        else:
            known.append(picture)
    return known


def class_files(
    directory: Path, names: dict[str, str], bad: list[BadFile], task: TaskName = "single-label"
) -> list[tuple[Path, Label]]:
    """Find all images below the class folders, with their classes, in the order of their paths.

    Args:
        directory: folder that contains the class folders.
        names: folder name of each class, of both sets; names of this set are added.
        bad: list that receives unusable files.
        task: type of the labels.
    """
    if task == "multi-label":
        raise DataError(
            f"{readable(directory)}: expected a table for --task multi-label, such as --data "
            f"labels.csv with --image-column and --label-column: an image in a class folder has "
            f"only one class"
        )
    if not directory.is_dir():
        raise DataError(f"{readable(directory)}: expected a folder with one folder per class")
    folders = visible_folders(directory)
    if not folders:
        raise DataError(
            f"{readable(directory)}: expected one folder per class, found none: sort the images "
            f"into folders named after their classes, or name a table of images and labels "
            f"with --data"
        )
    refuse_masks(directory, [folder.name for folder in folders])
    files: list[tuple[Path, Label]] = []
    for folder in folders:
        # An unreadable folder is reported already, so do not also report it as empty.
        before = len(bad)
        paths = picture_paths(folder, bad)
        if not paths and len(bad) == before:
            bad.append(BadFile(folder, "expected images of the class, found none"))
        try:
            label = read_label(_class_of(folder, names), task)
        except ValueError as wrong:
            raise DataError(f"{readable(folder)}: {wrong} (the folder's name)") from wrong
        files += [(path, label) for path in paths]
    return files


def _class_of(folder: Path, names: dict[str, str]) -> str:
    """Return the class name of a folder; bytes that are not UTF-8 become text such as ``\\xe9``.

    Raises:
        DataError: another folder would have the same class name.
    """
    label = os.fsencode(folder.name).decode(errors="backslashreplace")
    # A folder may really be called "\\xe9" in ASCII, next to one whose name is the byte E9.
    other = names.setdefault(label, folder.name)
    if other != folder.name:
        raise DataError(
            f"{readable(folder.parent)}: expected distinct class names, got "
            f"{os.fsencode(other)!r} and {os.fsencode(folder.name)!r}: rename one of them"
        )
    return label
