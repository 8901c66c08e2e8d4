"""Loads a trained run for use in a program: its model, what its inputs are made by, its classes."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any, Literal

import numpy as np
from torch import nn

import onefold
from onefold.weights import check_weights
from onefold_jobs.catalog import job_of
from onefold_jobs.finetune import chosen_checkpoint, load_finite
from onefold_jobs.job import Batch
from onefold_jobs.runfolder import read_run

__all__ = ["LoadedRun", "load_run"]


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
    job = job_of(path)
    checkpoint = chosen_checkpoint(path, weights)
    check_weights(checkpoint)
    loaded = job.use.load(path)
    load_finite(loaded.model, checkpoint)
    loaded.module.requires_grad_(False).eval()
    common = {"onefold": onefold.__version__, "job": job.name, "model": read_run(path).get("model")}
    return LoadedRun(
        job=job.name,
        module=loaded.module,
        preprocess=partial(_preprocessed, loaded.preprocess),
        classes=tuple(loaded.description.get("classes", ())),
        weights=checkpoint,
        description={**common, **loaded.description},
    )


def _preprocessed(preprocess: Callable[[Sequence[Any]], Batch], inputs: Iterable[Any]) -> Batch:
    """Make a batch of a list, and of nothing else: a text would be read letter by letter."""
    if isinstance(inputs, str | Path | np.ndarray) or not isinstance(inputs, Iterable):
        raise TypeError(f"preprocess: expected a list of inputs, got {type(inputs).__name__}")
    if not (several := [*inputs]):
        raise ValueError("preprocess: expected a list of one input or more, got none")
    return preprocess(several)
