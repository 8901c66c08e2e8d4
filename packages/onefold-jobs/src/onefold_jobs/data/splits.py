"""Finds the training and test folders of a data set, for every job and command.

Only the names of folders are read, and where pictures begin.

Note: which folders are a split
-------------------------------
Data sets spell their parts in many ways: ``train`` and ``test``, ``Training`` and ``Testing``,
``seg_train`` and ``seg_test``. Taken for classes, a model would learn to tell the parts apart. So
two folders are a split if their names have a word for different parts and are the same otherwise.
One such word alone may name a class (a train is a vehicle). Folders that share the names of their
subfolders, as folds and sites do, may be parts or classes: they are refused.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from onefold.cli import in_shell, listed
from onefold.errors import DataError
from onefold_jobs.data.files import readable
from onefold_jobs.data.pictures import is_picture, visible_folders

__all__ = ["Folders", "find_folders", "refuse_masks"]

_PARTS = {
    **dict.fromkeys(("train", "training"), "train"),
    **dict.fromkeys(("val", "valid", "validation"), "val"),
    **dict.fromkeys(("test", "testing"), "test"),
}
"""The part of a data set that a word names."""
_WORD = re.compile(rf"(?<![a-z])({'|'.join(sorted(_PARTS, reverse=True))})(?![a-rt-z]|s(?!et))")
_GENERAL = re.compile(r"(dataset|data|set|split|folder|images?|imgs?|pictures?|photos?)(?![a-z])")
_MOST_WRAPPED = 3
"""Folders around a data set, each the only one in the folder above."""
_COPIED = 3
"""Classes that are looked for in a folder that may hold a copy of the data set."""
_IMAGE_FOLDERS = frozenset({"image", "images", "img", "imgs"})
_MASK_FOLDERS = frozenset({
    "annotations", "groundtruth", "gt", "label", "labels", "mask", "masks", "segmentation",
    "segmentations",
})  # fmt: skip


@dataclass(frozen=True, slots=True)
class Folders:
    """The folders of a data set."""

    train: Path
    """Holds what to train with; all of the data if there is no split."""
    test: Path | None = None
    """Holds what to test with; None if there is no such folder."""
    is_split: bool = False
    """Whether ``train`` is a part of the data, beside which others may be."""
    notes: list[str] = field(default_factory=list)
    """Which folders were chosen, if their names or places are not the usual ones."""

    def require_test(self) -> Path:
        """Return the folder to test with.

        Raises:
            DataError: there is none beside the training set.
        """
        if self.test is None:
            train = self.train
            raise DataError(
                f"{readable(train.parent)} has a folder {readable(Path(train.name))}, and none of "
                f"val, valid, validation, test: expected both. To hold out a share of "
                f"{readable(Path(train.name))} (--holdout), pass --data "
                f"{in_shell(readable(train))}"
            )
        return self.test


def find_folders(
    directory: Path,
    *,
    choosing: bool = True,
    classes: Collection[str] = (),
    masks: bool = False,
    as_is: bool = False,
) -> Folders:
    """Find the folders to train and to test with.

    Args:
        directory: what ``--data`` names.
        choosing: whether the scores choose the best epoch; a validation set then comes before
            ``test``, which stays unseen.
        classes: names that are known to be classes; a folder that holds one is no split.
        masks: whether the data are folders of images and masks, and not class folders.
        as_is: take folders for classes even if they may be parts of a data set.

    Raises:
        DataError: it is not certain which folders are meant.
    """
    if not directory.is_dir():
        return Folders(directory)
    named = {each.name for each in visible_folders(directory)}
    if named & set(classes) or (masks and "images" in named and "train" not in named):
        return Folders(directory)
    root = _unwrapped(directory, masks=masks)
    folders = visible_folders(root)
    found = _split(root, folders, choosing=choosing, masks=masks)
    if found is None:
        found = Folders(root)
        if not masks and not as_is:
            _refuse_parts(root, folders)
    used = [each for each in (found.train, found.test) if each not in (None, directory)]
    usual = all(each and each.parent == directory and each.name in _PARTS for each in used)
    if used and not usual:
        words = zip(("trains with", "tests with"), used, strict=False)
        found.notes.append("; ".join(f"{word} {readable(each or root)}" for word, each in words))
    return found


def _unwrapped(folder: Path, *, masks: bool = False) -> Path:
    """Descend into folders that archives put around a data set."""
    inside = folder
    for _ in range(_MOST_WRAPPED):
        inner = visible_folders(inside)
        if len(inner) != 1:
            # Several folders, and no picture: a class has pictures.
            return inside if len(inner) > 1 and not _has_pictures(inside) else folder
        name = inner[0].name
        part = _part_of(name)
        # A training set without a test set is reported instead, unless it only repeats its name.
        alone = part and not part[1] and name.lower() != inside.name.lower()
        if alone or (masks and name in ("images", "masks")):
            return folder
        inside = inner[0]
    return folder


def _has_pictures(folder: Path) -> bool:
    return any(map(is_picture, folder.iterdir()))


def _part_of(name: str) -> tuple[str, str] | None:
    """The part of a data set that a name stands for, and the rest of it; None if it names none.

    >>> _part_of("seg_train"), _part_of("TestSet"), _part_of("latest"), _part_of("train2017")
    (('train', 'seg_'), ('test', ''), None, ('train', '2017'))
    """
    text = re.sub(r"(?<=[a-z])(?=[A-Z])", "_", name).lower()
    found = _WORD.findall(text)
    if len(found) != 1:
        return None
    rest = _GENERAL.sub("", _WORD.sub("", text, count=1))
    return _PARTS[found[0]], rest if re.search(r"[^\W_]", rest) else ""


def _split(root: Path, folders: Sequence[Path], *, choosing: bool, masks: bool) -> Folders | None:
    groups: dict[str, dict[str, list[Path]]] = {}
    for folder in folders:
        if part := _part_of(folder.name):
            groups.setdefault(part[1], {}).setdefault(part[0], []).append(folder)
    whole = [group for group in groups.values() if len(group) > 1]
    if len(whole) > 1:
        first = listed([each.name for group in whole for part in group.values() for each in part])
        raise DataError(
            f"{readable(root)}: expected one training set and one test set, got several: {first}. "
            f"Move those that belong together into a folder, and name it with --data"
        )
    group = whole[0] if whole else groups.get("", {})
    names = ("val", "test") if choosing else ("test", "val")
    test = next((_one(root, group[name]) for name in names if name in group), None)
    if "train" in group:
        train = _one(root, group["train"])
        # One called train alone may be a class.
        if test is not None or not _has_pictures(train):
            train = _unwrapped(train, masks=masks)
            trained = {each.name for each in visible_folders(train)}
            # A test set of a single class has one folder as well.
            if test and trained.isdisjoint(each.name for each in visible_folders(test)):
                test = _unwrapped(test, masks=masks)
            return Folders(train, test, is_split=True)
        return None
    if not whole:
        return None
    if choosing or test is None:
        raise DataError(
            f"{readable(root)}: expected a folder to train with beside "
            f"{listed(sorted(each.name for part in group.values() for each in part))}, such as "
            f"{readable(root / 'train')}, found none"
        )
    return Folders(root, _unwrapped(test, masks=masks), is_split=True)


def _one(root: Path, folders: Sequence[Path]) -> Path:
    """Choose among folders for one part: a usual name before others."""
    by_name = {each.name: each for each in folders}
    usual = [by_name[name] for name in _PARTS if name in by_name]
    if not usual and len(folders) > 1:
        raise DataError(
            f"{readable(root)}: expected one folder for each part of the data, got "
            f"{listed(sorted(by_name))} for the same: join them, or leave one there"
        )
    return (usual or folders)[0]


def _refuse_parts(root: Path, folders: Sequence[Path]) -> None:
    """Refuse class folders that may be parts of a data set.

    Raises:
        DataError: they share subfolders, one holds all others, or one is called test.
    """
    names = [folder.name for folder in folders]
    refuse_masks(root, names)
    way = (
        f"if {listed(names)} are the classes, onefold train takes them with --labels-as-is"
        if len(names) > 1
        else ""
    )
    shared: set[str] | None = None
    for folder in folders:
        within = {each.name for each in visible_folders(_unwrapped(folder))}
        shared = within if shared is None else shared & within
        if len(shared) < 2:
            break
    if shared and len(shared) > 1 and len(folders) > 1:
        raise DataError(
            f"{readable(root)}: all of {listed(names)} have the folders {listed(sorted(shared))}, "
            f"so the classes may be either: expected one folder for each class. For one part, "
            f"name it (such as {in_shell(readable(folders[0]))}); for all, move the pictures of "
            f"each class together; {way}"
        )
    for folder in folders:
        others = [name for name in names if name != folder.name][:_COPIED]
        if len(others) > 1 and all((folder / name).is_dir() for name in others):
            raise DataError(
                f"{readable(folder)} holds folders of the same names as the classes beside it, "
                f"{listed(others)}: expected each class once. Remove the copy, or name the folder "
                f"with --data if it is another part of the data; {way}"
            )
        part = _part_of(folder.name)
        if part and not part[1] and part[0] != "train" and len(folders) > 1:
            raise DataError(
                f"{readable(folder)}: expected a folder for each class, got one that is called as "
                f"a test set is, beside {listed([x for x in names if x != folder.name])}. Move "
                f"the classes to train with into a folder train beside it; {way}"
            )


def refuse_masks(directory: Path, names: Sequence[str]) -> None:
    """Refuse a data set of pictures and masks, which would be learned as two classes.

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
            f"train segment --data {in_shell(readable(data))}{other}"
        )
