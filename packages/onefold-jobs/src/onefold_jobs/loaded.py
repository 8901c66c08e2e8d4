"""Loads a trained run for use in a program: its model, what its inputs are made by, its classes."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any, Literal

import msgspec
import numpy as np
import torch
from torch import nn

import onefold
from onefold.errors import DataError
from onefold.weights import check_weights
from onefold_jobs import classify_job, require, segment_job, text_job
from onefold_jobs.data.augment import LabeledPictures
from onefold_jobs.data.pictures import in_bytes, open_picture
from onefold_jobs.finetune import KeptModel, chosen_checkpoint, load_finite
from onefold_jobs.runfolder import read_run
from onefold_jobs.segment_pictures import Padded

__all__ = ["LoadedRun", "load_run"]

Batch = dict[str, torch.Tensor]
_ARRAYS = {(2, "uint8"), (2, "uint16"), (3, 3, "uint8")}
"""Dimensions, channels if there are any, and dtype of those that are pictures."""
_OPENED = (
    "turned upright by EXIF; more than 8 bits: clip(0, white) * 255 / white, rounded down; "
    "transparent pixels put on white; converted to mode by Pillow"
)
_RESIZED = (
    "Pillow's resize((center_crop, center_crop), BILINEAR, box, reducing_gap=2.0): antialiased, "
    "rounded to 8 bits; of both sides resized = max(shorter_side, round(side * shorter_side / "
    "shorter of both)), start = (resized - center_crop) // 2, and the box reaches from start * "
    "side / resized to (start + center_crop) * side / resized"
)
_NORMALIZED = "images (n, channels, h, w) float32: (pixels / 255 - mean) / std, by channel"
_PADDED = (
    "zeros after normalization, on the right and below, to a common height and width that are "
    "multiples of side_multiple, and twice it at least"
)


@dataclass(frozen=True, slots=True, kw_only=True)
class LoadedRun:
    """A trained run in a program; see `load_run`, which makes it."""

    job: str
    """``classify``, ``segment`` or ``text``."""
    module: nn.Module
    """The model in evaluation mode, on the CPU. It takes what ``preprocess`` returns, and gives
    logits: (n, classes) float32, or (n, 1 or classes, h, w) of masks. Of a number it gives (n, 1)
    float32, in standard deviations from the mean, as ``description["target"]`` has them."""
    preprocess: Callable[[Sequence[Any]], Batch]
    """Makes a batch of a list of texts, or of pictures: paths, Pillow's pictures, or arrays (h, w)
    or (h, w, 3) uint8, or (h, w) uint16. Each is prepared by itself, as in training without
    augmentation. Pictures for masks are padded on the right and below to a common size."""
    classes: tuple[str, ...]
    """Names of the classes, in the order of the logits; none for numbers and plain masks."""
    weights: Path
    """The folder of the checkpoint."""
    description: dict[str, Any] = field(repr=False)
    """Model, classes and preprocessing in words and numbers, for programs without onefold."""


def load_run(folder: str | Path, *, weights: Literal["best", "last"] = "best") -> LoadedRun:
    """Load a run that ``onefold train`` has made.

    Args:
        folder: of the run.
        weights: its best checkpoint, or its last.

    Raises:
        DataError: the folder is not that of a run, or is damaged.
        CheckpointError: the run has no weights yet, or they are damaged or not finite.
        LaunchError: a library is missing that reads the run's inputs.

    Example:
        >>> import tempfile
        >>> from PIL import Image
        >>> small = {"model": "lenet", "epochs": 1, "runs": tempfile.mkdtemp()}
        >>> result = onefold_jobs.classify(data="digits", devices=1, **small)
        >>> run = onefold_jobs.load_run(result.folder)
        >>> batch = run.preprocess([Image.new("L", (8, 8)), Image.new("L", (9, 7))])
        >>> run.module(**batch).softmax(dim=1).shape
        torch.Size([2, 10])
    """
    path = Path(folder)
    job = str(read_run(path).get("job"))
    if job not in _LOADERS:
        raise DataError(f"{path}: expected a run of {', '.join(_LOADERS)}, got {job}")
    checkpoint = chosen_checkpoint(path, weights)
    check_weights(checkpoint)
    model, module, preprocess, facts = _LOADERS[job](path)
    load_finite(model, checkpoint)
    module.requires_grad_(False).eval()
    common = {"onefold": onefold.__version__, "job": job, "model": read_run(path).get("model")}
    return LoadedRun(
        job=job,
        module=module,
        preprocess=partial(_preprocessed, preprocess),
        classes=tuple(facts.get("classes", ())),
        weights=checkpoint,
        description={**common, **facts},
    )


_Loaded = tuple[nn.Module, nn.Module, Callable[[Sequence[Any]], Batch], dict[str, Any]]
"""The model with the names of its weights, how it is called, and what comes before and after."""


def _preprocessed(preprocess: Callable[[Sequence[Any]], Batch], inputs: Iterable[Any]) -> Batch:
    """Make a batch of a list, and of nothing else: a text would be read letter by letter."""
    if isinstance(inputs, str | Path | np.ndarray) or not isinstance(inputs, Iterable):
        raise TypeError(f"preprocess: expected a list of inputs, got {type(inputs).__name__}")
    if not (several := [*inputs]):
        raise ValueError("preprocess: expected a list of one input or more, got none")
    return preprocess(several)


def _load_pictures(run: Path) -> _Loaded:
    kind, model = classify_job.PictureModel.built(run)

    def preprocess(pictures: Sequence[Any]) -> Batch:
        return {"images": torch.stack(_tensors(pictures, kind, kind.mode, kind.test_changes))}

    (cut,) = kind.test_changes
    shorter = round(cut.size * cut.margin)
    before = {"mode": kind.mode, "shorter_side": shorter, "center_crop": cut.size}
    return model, model, preprocess, _facts(kind, {**before, **_numbers(kind), "resized": _RESIZED})


def _load_masks(run: Path) -> _Loaded:
    kind, model = segment_job.MaskModel.built(run)

    def preprocess(pictures: Sequence[Any]) -> Batch:
        images = _tensors(pictures, kind, "RGB", ())
        mask = torch.zeros(1, 1)
        return {"images": Padded(model.stride)([(image, mask) for image in images])["images"]}

    before = {"mode": "RGB", "side_multiple": model.stride, **_numbers(kind), "padded": _PADDED}
    facts = {"threshold": kind.threshold, "classes": [each.name for each in kind.classes]}
    return model, model, preprocess, {**facts, "preprocessing": before}


def _facts(
    kind: classify_job.PictureModel | text_job.TextModel, before: dict[str, Any]
) -> dict[str, Any]:
    target = msgspec.to_builtins(kind.target)
    facts = {"target": target, "classes": list(kind.classes), "preprocessing": before}
    number = kind.target.task == "regression"
    return {**facts, "value": "logits * target.std + target.mean"} if number else facts


def _load_texts(run: Path) -> _Loaded:
    kind = text_job.TextModel.of_run(run)
    model = kind.build(run)

    def preprocess(texts: Sequence[str]) -> Batch:
        batch = kind.collate([(ids, 0) for ids in kind.encode(texts)])
        return {name: batch[name] for name in ("input_ids", "attention_mask")}

    before = {
        "tokenizer": text_job.TOKENIZER_FILE,
        "max_length": kind.max_length,
        "pad": kind.pad_id,
    }
    return model, TextLogits(model), preprocess, _facts(kind, before)


class TextLogits(nn.Module):
    """A model of transformers that returns nothing but its logits."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, input_ids: torch.Tensor, attention_mask: torch.Tensor) -> torch.Tensor:
        """Return logits (n, classes) float32 of ids and masks, (n, t) int64 each."""
        logits: torch.Tensor = self.model(input_ids=input_ids, attention_mask=attention_mask).logits
        return logits


_LOADERS: dict[str, Callable[[Path], _Loaded]] = {
    classify_job.JOB: _load_pictures,
    segment_job.JOB: _load_masks,
    text_job.JOB: _load_texts,
}


def _tensors(
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


def _numbers(kind: KeptModel) -> dict[str, Any]:
    """How a file becomes pixels, and pixels numbers."""
    numbers = {"white": kind.white or 255, "mean": list(kind.mean), "std": list(kind.std)}
    return {**numbers, "opened": _OPENED, "normalized": _NORMALIZED}
