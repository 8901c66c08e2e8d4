"""Finds the inputs of runs on pictures, and turns them into tensors."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import torch

from onefold.errors import DataError
from onefold_jobs import require
from onefold_jobs.data.augment import LabeledPictures
from onefold_jobs.data.classes import listed_files
from onefold_jobs.data.files import BadFile, name_below
from onefold_jobs.data.pictures import PictureFiles, in_bytes, open_picture, picture_paths
from onefold_jobs.data.scan import Scanning, Seen, notes_of, scan_pictures
from onefold_jobs.data.tables import Columns, is_table, read_table
from onefold_jobs.finetune import KeptModel
from onefold_jobs.job import Input, Use
from onefold_jobs.progress import reading_bar
from onefold_jobs.runfolder import read_run
from onefold_jobs.words import tell

__all__ = [
    "files_of",
    "noise",
    "numbers_of",
    "paths_of",
    "read_pictures",
    "readable_pictures",
    "tensors_of",
]

_ARRAYS = {(2, "uint8"), (2, "uint16"), (3, 3, "uint8")}

"""Dimensions, channels if there are any, and dtype of arrays that are pictures."""
_OPENED = (
    "turned upright by EXIF; more than 8 bits: clip(0, white) * 255 / white, rounded down; "
    "transparent pixels put on white; converted to mode by Pillow"
)

_NORMALIZED = "images (n, channels, h, w) float32: (pixels / 255 - mean) / std, by channel"


def read_pictures(
    kind: KeptModel, run: Path, paths: Sequence[Path], columns: Columns, *, unique: bool = True
) -> tuple[list[Input], list[BadFile]]:
    """Find all pictures, and read each once; return those that can be read, and the others."""
    require("reading pictures", "images", "PIL")
    classes = {*map(str, read_run(run).get("classes") or ())}
    found: dict[Path, Input] = {}
    bad: list[BadFile] = []
    # By path, so that a file that was named, and its folder as well, counts once.
    for path in paths:
        if is_table(path):
            rows, wrong, _ = read_table(path, columns, None)
            bad += wrong
            for each, label in listed_files(rows, path, bad):
                found.setdefault(each, Input(each, name_below(each, path.parent), label=str(label)))
        elif path.is_dir():
            for each in picture_paths(path, bad):
                name = each.relative_to(path)
                # The innermost folder that is named as a class.
                label = next((part for part in name.parts[-2::-1] if part in classes), "")
                found.setdefault(each, Input(each, str(name), label=label))
        elif path.is_file():
            found.setdefault(path, Input(path, path.name))
        else:
            raise DataError(f"{path}: expected a file or folder, there is none")
    inputs = [*found.values()]
    if unique and len({each.name for each in inputs}) < len(inputs):
        # Of one name in several folders: nobody could tell their rows apart.
        inputs = [replace(each, name=str(each.path)) for each in inputs]
    return readable_pictures(kind, inputs, bad), bad


def readable_pictures(kind: KeptModel, inputs: Sequence[Input], bad: list[BadFile]) -> list[Input]:
    """Read each picture once; return those that the run can use, and add the others to ``bad``."""
    with reading_bar() as watch:
        scanning = Scanning(watch=watch, white=kind.white or 0)
        seen = scan_pictures([each.path for each in inputs], scanning=scanning)
    bad += [each for each in seen if isinstance(each, BadFile)]
    for note in notes_of([each.look for each in seen if isinstance(each, Seen)]):
        tell(note)
    return [one for one, each in zip(inputs, seen, strict=True) if isinstance(each, Seen)]


def files_of(use: Use, kind: KeptModel) -> PictureFiles:
    """The files of the inputs, as the model's pictures are read."""
    return PictureFiles([each.path for each in use.inputs], Path(), kind.white)


def tensors_of(
    pictures: Sequence[Any], kind: KeptModel, mode: Any, changes: Sequence[Any]
) -> list[torch.Tensor]:
    """Make each picture or file a tensor, as in tests."""
    require("reading pictures", "images", "PIL")
    opened: Any = [_opened(each, n, kind.white) for n, each in enumerate(pictures)]
    data = LabeledPictures(opened, range(len(opened)), mode, changes, kind.normalize)
    return [data[number][0] for number in range(len(data))]


def _opened(picture: Any, number: int, white: int | None) -> Any:
    from PIL import Image

    if isinstance(picture, str | Path):
        return open_picture(Path(picture), white=white)
    if isinstance(picture, np.ndarray):
        if (picture.ndim, *picture.shape[2:], picture.dtype.name) not in _ARRAYS:
            words = "expected an array (h, w) or (h, w, 3) of uint8, or (h, w) of uint16, got"
            raise TypeError(f"picture {number}: {words} {picture.shape} of {picture.dtype}")
        picture = Image.fromarray(picture)
    return in_bytes(picture, Path(f"picture {number}"), white)


def numbers_of(kind: KeptModel) -> dict[str, Any]:
    """How a file becomes pixels, and pixels numbers."""
    numbers = {"white": kind.white or 255, "mean": list(kind.mean), "std": list(kind.std)}
    return {**numbers, "opened": _OPENED, "normalized": _NORMALIZED}


def noise() -> list[Any]:
    """Three pictures of different sizes."""
    from PIL import Image

    return [Image.effect_noise((96, 64 + 32 * number), 99).convert("RGB") for number in range(3)]


def paths_of(paths: Iterable[Path]) -> Iterator[tuple[Path, int]]:
    """Resolve paths, each with line 0."""
    return ((path.resolve(), 0) for path in paths)
