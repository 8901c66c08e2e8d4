"""Finds the training and test folders of a dataset, for every job and command.

Only reads the names of folders, and which folders contain images.

Note: which folders are a split
-------------------------------
Datasets name their parts in many ways: ``train`` and ``test``, ``Training`` and ``Testing``,
``seg_train`` and ``seg_test``. If they were taken for classes, a model would learn to distinguish
the parts. So two folders are a split if their names contain words for different parts and are
otherwise equal. A single such word may name a class (a train is a vehicle). Folders that share the
names of their subfolders, such as folds and sites, may be parts or classes: they are rejected.
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

__all__ = ["Folders", "find_folders", "is_mask", "refuse_masks"]

_PARTS = {
    **dict.fromkeys(("train", "training"), "train"),
    **dict.fromkeys(("val", "valid", "validation"), "val"),
    **dict.fromkeys(("test", "testing"), "test"),
}
"""Part of a dataset that each word names."""
_WORD = re.compile(rf"(?<![a-z])({'|'.join(sorted(_PARTS, reverse=True))})(?![a-rt-z]|s(?!et))")
_GENERAL = re.compile(r"(dataset|data|set|split|folder|images?|imgs?|pictures?|photos?)(?![a-z])")
_TABLES = (".csv", ".jsonl", ".parquet", ".tsv")
_MOST_WRAPPED = 3
"""Maximum number of nested folders around a dataset, each the only one in its parent."""
_COPIED = 3
"""Number of classes to look for in a folder that may contain a copy of the dataset."""
_IMAGE_FOLDERS = frozenset({"image", "images", "img", "imgs"})
_MASK_FOLDERS = frozenset({
    "annotations", "groundtruth", "gt", "label", "labels", "mask", "masks", "segmentation",
    "segmentations",
})  # fmt: skip


@dataclass(frozen=True, slots=True)
class Folders:
    """The folders of a dataset."""

    train: Path
    """Folder of the training set, or of all data if there is no split."""
    test: Path | None = None
    """Folder of the test set; None if there is none."""
    is_split: bool = False
    """Whether ``train`` is a part of the data, next to other parts."""
    notes: list[str] = field(default_factory=list)
    """Names of the chosen folders, if they are unusual, and of files that are not used."""

    def require_test(self) -> Path:
        """Return the folder of the test set.

        Raises:
            DataError: there is none next to the training set.
        """
        if self.test is None:
            train = self.train
            raise DataError(
                f"{readable(train.parent)} contains {readable(Path(train.name))}, but none of val, "
                f"valid, validation, test: expected both. To hold out a fraction of "
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
    """Find the folders of the training and the test set.

    Args:
        directory: argument of ``--data``.
        choosing: whether the scores select the best epoch; then a validation set takes precedence
            over ``test``, which stays unseen.
        classes: known class names; a folder that contains one is not a split.
        masks: whether the data are folders of images and masks instead of class folders.
        as_is: treat folders as classes even if they may be parts of a dataset.

    Raises:
        DataError: the folders are ambiguous.
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
        if not masks and (lists := _lists(directory)):
            found.notes.append(
                f"{readable(directory)}: not used: {listed(lists)}; if they contain the split or "
                f"the labels, name tables of paths and labels with --data and --dev"
            )
    used = [each for each in (found.train, found.test) if each not in (None, directory)]
    usual = all(each and each.parent == directory and each.name in _PARTS for each in used)
    if used and not usual:
        words = zip(("trains on", "tests on"), used, strict=False)
        found.notes.append("; ".join(f"{word} {readable(each or root)}" for word, each in words))
    return found


def _unwrapped(folder: Path, *, masks: bool = False) -> Path:
    """Descend into folders that archives put around a dataset."""
    inside = folder
    for _ in range(_MOST_WRAPPED):
        inner = visible_folders(inside)
        if len(inner) != 1:
            # Several folders and no image: it is not a class, because a class contains images.
            return inside if len(inner) > 1 and not _has_pictures(inside) else folder
        name = inner[0].name
        part = _part_of(name)
        # Otherwise, a training set without a test set is reported, unless it only repeats its name.
        alone = part and not part[1] and name.lower() != inside.name.lower()
        if alone or (masks and name in ("images", "masks")):
            return folder
        inside = inner[0]
    return folder


def _lists(directory: Path) -> list[str]:
    """Find files next to the folders that may contain a split or labels."""

    def may_list(path: Path) -> bool:
        if path.suffix.lower() != ".txt":
            return path.suffix.lower() in _TABLES
        stem = path.stem.lower()
        return "split" in stem or _WORD.search(stem) is not None

    names = [each.name for each in directory.iterdir() if may_list(each) and each.is_file()]
    return sorted(name for name in names if not name.startswith("."))


def _has_pictures(folder: Path) -> bool:
    return any(map(is_picture, folder.iterdir()))


def _part_of(name: str) -> tuple[str, str] | None:
    """Return the part of a dataset that a name means, and the rest of the name; None without a
    part.

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
        # A single folder called train may be a class.
        if test is not None or not _has_pictures(train):
            train = _unwrapped(train, masks=masks)
            trained = {each.name for each in visible_folders(train)}
            # A test set with a single class has only one folder, too.
            if test and trained.isdisjoint(each.name for each in visible_folders(test)):
                test = _unwrapped(test, masks=masks)
            return Folders(train, test, is_split=True)
        return None
    if not whole:
        return None
    if choosing or test is None:
        raise DataError(
            f"{readable(root)}: expected a training folder next to "
            f"{listed(sorted(each.name for part in group.values() for each in part))}, such as "
            f"{readable(root / 'train')}, found none"
        )
    return Folders(root, _unwrapped(test, masks=masks), is_split=True)


def _one(root: Path, folders: Sequence[Path]) -> Path:
    """Choose among folders for the same part, preferring a usual name."""
    by_name = {each.name: each for each in folders}
    usual = [by_name[name] for name in _PARTS if name in by_name]
    if not usual and len(folders) > 1:
        raise DataError(
            f"{readable(root)}: expected one folder for each part of the data, got "
            f"{listed(sorted(by_name))} for the same part: merge them, or keep one there"
        )
    return (usual or folders)[0]


def _refuse_parts(root: Path, folders: Sequence[Path]) -> None:
    """Reject class folders that may be parts of a dataset.

    Raises:
        DataError: they share subfolders, one contains all others, or one is called test.
    """
    names = [folder.name for folder in folders]
    refuse_masks(root, names)
    way = f"if {listed(names)} are the classes, pass --labels-as-is" if len(names) > 1 else ""
    shared: set[str] | None = None
    for folder in folders:
        within = {each.name for each in visible_folders(_unwrapped(folder))}
        shared = within if shared is None else shared & within
        if len(shared) < 2:
            break
    if shared and len(shared) > 1 and len(folders) > 1:
        raise DataError(
            f"{readable(root)}: all of {listed(names)} contain the folders "
            f"{listed(sorted(shared))}, so the classes may be either: expected one folder per "
            f"class. For one part, name it (such as {in_shell(readable(folders[0]))}); for all, "
            f"merge the images of each class; {way}"
        )
    for folder in folders:
        others = [name for name in names if name != folder.name][:_COPIED]
        if len(others) > 1 and all((folder / name).is_dir() for name in others):
            raise DataError(
                f"{readable(folder)} contains folders with the same names as the classes next to "
                f"it, {listed(others)}: expected each class once. Remove the copy, or name the "
                f"folder with --data if it is another part of the data; {way}"
            )
        part = _part_of(folder.name)
        if part and not part[1] and part[0] != "train" and len(folders) > 1:
            raise DataError(
                f"{readable(folder)}: expected one folder per class, got one that is named like a "
                f"test set, next to {listed([x for x in names if x != folder.name])}. Move "
                f"the training classes into a folder train next to it; {way}"
            )


def is_mask(path: Path, dataset: Path) -> bool:
    """Whether a file is in a folder of masks, next to one of images, below a dataset's folder."""
    above = [each for each in path.parents if each != dataset and each.is_relative_to(dataset)]
    return any(each.name == "masks" and (each.parent / "images").is_dir() for each in above)


def refuse_masks(directory: Path, names: Sequence[str]) -> None:
    """Reject a dataset of images and masks, which would be learned as two classes.

    Raises:
        DataError: one folder is named like images, and one like masks.
    """
    images = [name for name in names if name.lower() in _IMAGE_FOLDERS]
    masks = [name for name in names if name.lower() in _MASK_FOLDERS]
    if images and masks:
        data = directory.parent if directory.name == "train" else directory
        other = "" if {"images", "masks"} <= set(names) else " with folders named images and masks"
        raise DataError(
            f"{readable(directory)}: expected one folder per class, got {images[0]} and "
            f"{masks[0]}, which look like images with masks: for these, use onefold "
            f"train segment --data {in_shell(readable(data))}{other}"
        )
