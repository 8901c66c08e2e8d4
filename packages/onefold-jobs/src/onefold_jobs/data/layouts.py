"""Recognizes the layout of datasets that a job would misread, and recommends what to do instead.

This check comes first, so that users do not repair a folder of the wrong kind file by file. It
reads only a few names and the beginnings of a few files.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from contextlib import suppress
from itertools import islice
from pathlib import Path

from onefold.cli import in_shell, listed
from onefold.errors import DataError
from onefold.files import open_plain
from onefold_jobs.data.columns import Columns, usual_column
from onefold_jobs.data.files import readable
from onefold_jobs.data.labels import TaskName, check_task
from onefold_jobs.data.pictures import is_picture, visible_folders
from onefold_jobs.data.tables import column_names, is_table, read_table

__all__ = ["refuse_other_layouts"]

_LOOKED_AT = 5
"""Number of files of each kind to open."""
_BYTES = 1 << 16
"""Bytes to read from the beginning and from the end of a file."""
_YOLO = re.compile(r"[0-9]+(?:[ \t]+-?[0-9]*\.?[0-9]+(?:[eE][-+]?[0-9]+)?){4,}[ \t]*")
_NO_CLASSES = frozenset({
    "image", "images", "img", "imgs", "jpeg", "jpg", "photo", "photos", "picture", "pictures",
    "png", "set", "test", "testing", "train", "training", "val", "valid", "validation",
})  # fmt: skip
"""Names of dataset folders whose labels are in a table; none of them is a class name."""


_MASKS = ("masks", "train/masks")


def refuse_other_layouts(
    directory: Path, job: str, *, texts: bool = False, masks: bool = False
) -> None:
    """Reject object detection datasets, and images with a table of labels in the same folder.

    Args:
        directory: argument of ``--data``; a file is only rejected if it contains bounding boxes.
        job: name of the job.
        texts: whether its samples are texts.
        masks: whether it reads a folder of masks.

    Raises:
        DataError: the dataset is of such a kind. The message explains what to do.
    """
    boxes = next(_boxes(directory), None)
    if boxes:
        raise DataError(
            f"{readable(directory)}: expected a label or a mask for each image, got bounding boxes "
            f"({boxes}). onefold has no job for object detection: crop the objects into class "
            f"folders for onefold train classify, draw them as masks for onefold train segment, or "
            f"write a script for a detector with onefold.Trainer"
        )
    masked = masks and any((directory / each).is_dir() for each in _MASKS)
    if not texts and directory.is_dir() and not masked:
        _refuse_table(directory, job)
    if texts and directory.is_dir():
        _refuse_folders_of_texts(directory)


def _refuse_folders_of_texts(directory: Path) -> None:
    """Reject class folders of text files; the message contains a command that makes a table."""
    found = next(_first(directory, "train/*/*.txt", "*/*.txt"), None)
    if found is None or any(map(_lists, directory.iterdir())):
        return
    inside = found.parent.parent
    raise DataError(
        f"{readable(directory)}: expected a table of texts and labels, got class folders of text "
        f"files ({_below(found, directory)}): convert each set to a table with\n"
        f"python -c \"import json, pathlib; [print(json.dumps({{'text': p.read_text(), 'label': "
        f"p.parent.name}})) for p in sorted(pathlib.Path({readable(inside)!r}).glob('*/*.txt'))]\" "
        f"> {inside.name}.jsonl\nand name the training table with --data, the test table with --dev"
    )


def _boxes(directory: Path) -> Iterator[str]:
    """Describe the files that contain bounding boxes."""
    for path in _first(directory, "labels/*.txt", "labels/*/*.txt", "*/labels/*.txt"):
        line = next(iter(_ends(path).splitlines()), "")
        if _YOLO.fullmatch(line):
            yield f"{_below(path, directory)} begins with {line[:60]!r}, as YOLO's labels do"
    places = ("*.json", "annotations/*.json", "*/*.coco.json")
    named = [directory] if directory.suffix.lower() == ".json" else []
    for path in (*named, *_first(directory, *places)):
        text = _ends(path)
        if '"images"' in text and ('"bbox"' in text or '"annotations"' in text):
            yield f"{_below(path, directory)} has COCO's images and annotations"
    # In Pascal VOC, the user may mean the masks, which have their own folder.
    if not (directory / "SegmentationClass").is_dir():
        for path in _first(directory, "*.xml", "[Aa]nnotations/*.xml", "*/*.xml"):
            if "<bndbox>" in _ends(path):
                yield f"{_below(path, directory)} has a <bndbox>, as Pascal VOC's annotations do"


def _first(directory: Path, *patterns: str) -> Iterator[Path]:
    for pattern in patterns:
        yield from islice(directory.glob(pattern), _LOOKED_AT)


def _below(path: Path, directory: Path) -> str:
    return readable(path.relative_to(directory if path != directory else path.parent))


def _ends(path: Path) -> str:
    """Return the beginning and the end of a file; empty if it cannot be read."""
    try:
        with open_plain(path, follow=True) as file:
            content = file.read(_BYTES)
            # A COCO file stores its annotations after all of its images.
            file.seek(max(len(content), path.stat().st_size - _BYTES))
            return (content + file.read(_BYTES)).decode(errors="replace")
    # The code that reads the file reports this error.
    except OSError:
        return ""


def _refuse_table(directory: Path, job: str) -> None:
    """Reject images without class folders, whether or not there is a table, as in competitions."""
    folders = visible_folders(directory)
    train = directory / "train"
    classes = visible_folders(train) if train.is_dir() else folders
    if not all(map(_names_a_part, classes)):
        return
    if not any(
        any(map(is_picture, folder.iterdir())) for folder in (directory, *folders, *classes)
    ):
        return
    tables = {path: column_names(path) for path in sorted(directory.iterdir()) if _lists(path)}

    def likely(path: Path) -> tuple[bool, bool]:
        # Test sets of competitions have no labels, and sample submissions have wrong ones.
        handed_in = re.search("submission|test", path.stem.lower())
        return bool(usual_column(tables[path], "label")), not handed_in

    found = max(tables, key=likely, default=None)
    wanted = "a folder per class" if job == "classify" else "the folders images and masks"
    if found is None:
        parts = [folder for folder in classes if any(map(is_picture, folder.iterdir()))]
        if job == "classify" and parts:
            raise DataError(
                f"{readable(directory)}: expected {wanted}, got images in "
                f"{listed([each.name for each in parts])}, which name parts of a dataset: sort "
                f"them into folders named after their classes, or name a table of images and "
                f"labels with --data"
            )
        return
    names = tables[found]
    image = usual_column(names, "image") or names[0]
    label = usual_column(names, "label") or next((x for x in names if x != image), "LABEL")
    raise DataError(
        f"{readable(directory)}: expected {wanted}, got images next to the table {found.name} "
        f"with the columns {listed(names, 12)}: name the table and two of its columns, such as "
        f"onefold train classify --data {in_shell(readable(found))} --image-column "
        f"{in_shell(image)} --label-column {in_shell(label)}{_task(found, image, label)}"
    )


def _task(table: Path, image: str, label: str) -> str:
    """Return the option of the task that a table's labels fit; empty for one class per image."""
    tasks: tuple[TaskName, ...] = ("single-label", "regression", "multi-label")
    for task in tasks:
        with suppress(DataError):
            lines, bad, _ = read_table(table, Columns("image", image, (label,)), task)
            labels = [line.label for line in lines]
            check_task(labels, task, readable(table), labels_as_is=False)
            if not bad:
                return "" if task == "single-label" else f" --task {task}"
    return ""


def _names_a_part(folder: Path) -> bool:
    """Whether a folder has a name such as ``train``, ``test_images`` or ``train2017``."""
    words = re.findall(r"[^\W\d_]+", folder.name.lower())
    return bool(words) and _NO_CLASSES.issuperset(words)


def _lists(path: Path) -> bool:
    return (is_table(path) or path.suffix.lower() == ".tsv") and bool(column_names(path))
