"""The models of the image jobs: what a run stores of them, and how images become their inputs."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Sequence
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Any, ClassVar, Self

import msgspec
import numpy as np
import torch

from onefold.cli import counted, in_shell
from onefold.errors import DataError
from onefold_jobs import require
from onefold_jobs.audience import tell
from onefold_jobs.data.augment import IMAGENET, Change, LabeledPictures, Normalize
from onefold_jobs.data.classes import listed_files
from onefold_jobs.data.columns import Columns
from onefold_jobs.data.files import BadFile, name_below
from onefold_jobs.data.pictures import (
    Mode,
    PictureFiles,
    Sums,
    in_bytes,
    open_picture,
    picture_paths,
)
from onefold_jobs.data.scan import Scanning, Seen, notes_of, scan_pictures
from onefold_jobs.data.splits import find_folders, is_mask
from onefold_jobs.data.tables import is_table, read_table
from onefold_jobs.finetune import run_of
from onefold_jobs.job import Input, Use, check_scales
from onefold_jobs.models.catalog import TIMM_PREFIX
from onefold_jobs.named_weights import timm_facts
from onefold_jobs.options import PictureOptions
from onefold_jobs.progress import reading_bar
from onefold_jobs.runfolder import kept_facts, read_run

__all__ = ["KeptModel", "noise", "paths_of", "statistics_of"]

_ARRAYS = {(2, "uint8"), (2, "uint16"), (3, 3, "uint8")}
"""Number of dimensions, channels if any, and dtype of arrays that represent images."""
_OPENED = (
    "turned upright by EXIF; more than 8 bits: clip(0, white) * 255 / white, rounded down; "
    "transparent pixels put on white; converted to mode by Pillow"
)
_NORMALIZED = "images (n, channels, h, w) float32: (pixels / 255 - mean) / std, by channel"


class KeptModel(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Description of an image model; stored in ``run.json``."""

    job: ClassVar[str]
    fact: ClassVar[str]
    """Key of the description in ``run.json``."""
    unique: ClassVar[bool] = True
    """Whether inputs of the same name in several folders are named by their full paths."""
    mean: tuple[float, ...]
    std: tuple[float, ...]
    white: int | None = None
    """Brightest value of images with more than 8 bits per pixel; None if there are none."""

    def __post_init__(self) -> None:
        check_scales(self.mean, self.std)
        channels = 1 if self.mode == "L" else 3
        if {len(self.mean), len(self.std)} != {channels}:
            raise ValueError(f"expected means and standard deviations of {channels} channels")

    @property
    def mode(self) -> Mode:
        """Mode that images are converted to."""
        return "RGB"

    @property
    def test_changes(self) -> Sequence[Change]:
        """Image transforms for predictions and tests."""
        return ()

    @property
    def normalize(self) -> Normalize:
        """Normalization of images."""
        return Normalize(self.mean, self.std)

    @classmethod
    def of_run(cls, run: Path) -> Self:
        """Read the description from the folder of a run.

        Raises:
            DataError: the folder does not contain a run of this job, or its ``run.json`` is
                damaged.
        """
        facts = read_run(run, cls.job)
        with kept_facts(run):
            return msgspec.convert(facts[cls.fact], cls)

    @classmethod
    def built(cls, run: Path) -> tuple[Self, Any]:
        """Read the description of a run's model, and build it with freshly initialized weights.

        Raises:
            DataError: see `of_run`; also if no model can be built from the description.
        """
        kind: Any = cls.of_run(run)
        with kept_facts(run):
            return kind, kind.build()

    @classmethod
    def before(cls, options: PictureOptions) -> Self | None:
        """Return the model of the run to start from; None without such a run."""
        run = run_of(options.pretrained)
        return cls.of_run(run) if run else None

    @classmethod
    def read(
        cls, run: Path, paths: Sequence[Path], columns: Columns
    ) -> tuple[list[Input], list[BadFile]]:
        """Find all images below paths, and read each once.

        Returns:
            The readable images, and the others.

        Raises:
            DataError: a path does not exist.
            LaunchError: Pillow is not installed.
        """
        require("reading pictures", "images", "PIL")
        kind, classes = cls.of_run(run), {*map(str, read_run(run).get("classes") or ())}
        found: dict[Path, Input] = {}
        bad: list[BadFile] = []
        # Keyed by path, so that a file that is named along with its folder counts once.
        for path in paths:
            if is_table(path):
                rows, wrong, _ = read_table(path, columns, None)
                bad += wrong
                for each, line in listed_files(rows, path, bad):
                    name = name_below(each, path.parent)
                    found.setdefault(each, Input(each, name, label=str(line.label)))
            elif path.is_dir():
                for each in _pictures_in(path, bad, classes, masks=not cls.unique):
                    inside = each.relative_to(path)
                    # The innermost folder that has the name of a class.
                    label = next((part for part in inside.parts[-2::-1] if part in classes), "")
                    found.setdefault(each, Input(each, str(inside), label=label))
            elif path.is_file():
                found.setdefault(path, Input(path, path.name))
            else:
                raise DataError(f"{path}: expected a file or folder, but it does not exist")
        inputs = [*found.values()]
        if cls.unique and len({each.name for each in inputs}) < len(inputs):
            # The same name in several folders: their rows could not be distinguished.
            inputs = [replace(each, name=str(each.path)) for each in inputs]
        return kind.readable(inputs, bad), bad

    def readable(self, inputs: Sequence[Input], bad: list[BadFile]) -> list[Input]:
        """Read each image once; return the usable ones, and add the others to ``bad``."""
        with reading_bar() as watch:
            scanning = Scanning(watch=watch, white=self.white or 0)
            seen = scan_pictures([each.path for each in inputs], scanning=scanning)
        bad += [each for each in seen if isinstance(each, BadFile)]
        for note in notes_of([each.look for each in seen if isinstance(each, Seen)]):
            tell(note)
        return [one for one, each in zip(inputs, seen, strict=True) if isinstance(each, Seen)]

    def data_of(self, pictures: Any, labels: Any) -> LabeledPictures:
        """Make a dataset of images, prepared as in tests."""
        return LabeledPictures(pictures, labels, self.mode, self.test_changes, self.normalize)

    def inputs_of(self, use: Use, labels: Any) -> LabeledPictures:
        """Make a dataset of a run's inputs."""
        files = PictureFiles([each.path for each in use.inputs], Path(), self.white)
        return self.data_of(use.arrays or files, labels)

    def tensors_of(self, pictures: Sequence[Any]) -> list[torch.Tensor]:
        """Turn each image or file into a tensor, as in tests."""
        require("reading pictures", "images", "PIL")
        opened = [_opened(each, n, self.white) for n, each in enumerate(pictures)]
        data = self.data_of(opened, range(len(opened)))
        return [data[number][0] for number in range(len(data))]

    @property
    def preprocessing(self) -> dict[str, Any]:
        """Description of the steps from a file to normalized values."""
        numbers = {"white": self.white or 255, "mean": list(self.mean), "std": list(self.std)}
        return {"mode": self.mode, **numbers, "opened": _OPENED, "normalized": _NORMALIZED}


def _pictures_in(
    directory: Path, bad: list[BadFile], classes: Collection[str], *, masks: bool
) -> list[Path]:
    """Find all images below a folder, without masks, and report the parts of a dataset."""
    paths = picture_paths(directory, bad)
    # Predictions need no labels, so an ambiguous layout is no error.
    with suppress(DataError):
        found = find_folders(directory, choosing=False, classes=classes, masks=masks, as_is=True)
        if found.test is not None:
            tell(
                f"{directory}: predicts all parts of this dataset; for the test set alone, name "
                f"{in_shell(found.test)}"
            )
    images = [each for each in paths if not (masks and is_mask(each, directory))]
    if len(images) < len(paths):
        tell(f"{directory}: leaves out {counted(len(paths) - len(images), 'mask')}")
    return images


def statistics_of(
    options: PictureOptions, before: KeptModel | None, sums: Sums, *, channels: int
) -> Iterator[tuple[float, ...]]:
    """Yield the means and the standard deviations that normalize images.

    Args:
        options: ``normalize`` and ``pretrained`` are used.
        before: model of the run that the weights come from, if any.
        sums: sums over the pixels of the training images.
        channels: number of image channels of the model.
    """
    chosen = options.normalize
    if chosen == "auto" and before:
        statistics = before.mean, before.std
    elif chosen == "auto" and (options.pretrained or "").startswith(TIMM_PREFIX):
        facts = timm_facts(options.pretrained or "")
        statistics = tuple(facts.mean), tuple(facts.std)
    elif chosen == "imagenet" or (chosen == "auto" and options.pretrained):
        statistics = IMAGENET
    else:
        statistics = ((0.0,), (1.0,)) if chosen == "none" else sums.mean_and_std()
    for values in statistics:
        many = values if len(values) > 1 else values * channels
        yield many if len(many) == channels else (sum(many) / len(many),)


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


def noise() -> list[Any]:
    """Return three images of different sizes."""
    from PIL import Image

    return [Image.effect_noise((96, 64 + 32 * number), 99).convert("RGB") for number in range(3)]


def paths_of(paths: Iterable[Path]) -> Iterator[tuple[Path, int]]:
    """Resolve paths, each with line 0."""
    return ((path.resolve(), 0) for path in paths)
