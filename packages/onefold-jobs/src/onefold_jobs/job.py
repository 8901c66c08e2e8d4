"""A ready-made job: functions that turn data into a run, and a run into results.

A new job is a file that defines a `Job`, and a line in `onefold_jobs.catalog`. All jobs share the
training loop, checkpoints, metrics, report, commands and the parsing of options.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, Literal, Protocol

import msgspec
import torch
from torch import nn

import onefold
from onefold_jobs.data.columns import Columns
from onefold_jobs.data.files import BadFile
from onefold_jobs.data.labels import Label, TaskName, divided, parts_of, separator
from onefold_jobs.data.pictures import ArrayPictures
from onefold_jobs.data.scan import Scanning
from onefold_jobs.finetune import load_finite
from onefold_jobs.options import (
    COUNT,
    MOST_SHARDS,
    MOST_WORKERS,
    again,
    check_limits,
    option,
    within,
)
from onefold_jobs.runfolder import kept_facts, read_run
from onefold_jobs.scores import Measured
from onefold_jobs.training import Task

__all__ = [
    "Batch",
    "EvaluateOptions",
    "Input",
    "Job",
    "Labeled",
    "LoadedModel",
    "PredictOptions",
    "Predicted",
    "RunFacts",
    "Target",
    "Use",
    "columns_of",
]

Format = Literal["csv", "json"]
Batch = dict[str, torch.Tensor]
_OF_RUN = "as in the run"


@dataclass(frozen=True, slots=True, kw_only=True)
class PredictOptions:
    """Options of ``onefold predict``."""

    devices: str = again("devices", "auto")
    output: Path | None = option(None, "File, or folder for masks.", shown="the screen")
    format: Format | None = option(None, "Format.", shown="by suffix")
    json: bool = option(False, "Print JSON, like --format json.")
    weights: Literal["best", "last"] = option("best", "Checkpoint.")
    top: int = option(1, "Number of classes to report per sample.", COUNT)
    batch_size: int | None = again("batch_size", heading="Devices", shown="the job's")
    workers: int = option(0, "Data loader processes per device.", within(0, MOST_WORKERS))
    text_column: str | None = option(None, "Text column(s): title,body.", shown=_OF_RUN)
    image_column: str | None = option(None, "Table column of image paths.", shown=_OF_RUN)
    skip_bad: bool = option(False, "Skip unreadable inputs.")

    def __post_init__(self) -> None:
        check_limits(self)


@dataclass(frozen=True, slots=True, kw_only=True)
class EvaluateOptions(PredictOptions):
    """Options of ``onefold evaluate``."""

    output: Path | None = option(None, "File for label and prediction per sample.", shown="none")
    label_column: tuple[str, ...] = option((), "Table column of labels.", shown="as in the run")
    json: bool = option(False, "Print the scores as JSON.")


@dataclass(frozen=True, slots=True)
class Input:
    """Input of a prediction: an image, or a line of a text file."""

    path: Path
    name: str
    """File name, relative to the path that the user gave."""
    text: str = ""
    line: int = 0
    label: Label = ""
    """Class name or other label; empty if unknown."""
    mask: Path | None = None
    """Ground-truth mask, if known."""

    @property
    def row(self) -> dict[str, Any]:
        """First columns of the input's prediction."""
        where = {"line": self.line, "text": self.text} if self.line else {}
        return {"file": self.name, **where}


@dataclass(frozen=True, slots=True)
class Labeled:
    """Samples with known labels."""

    where: Path
    inputs: list[Input]
    left_out: list[BadFile]
    arrays: ArrayPictures | None = None
    """Images that are not stored in files."""


class Target(msgspec.Struct, frozen=True):
    """Meaning of a model's outputs; stored with the model."""

    task: TaskName = "single-label"
    mean: float = 0.0
    """Mean of the training targets, which is an output of 0."""
    std: float = 1.0
    """Standard deviation of the training targets: an output of 1 is this far above the mean."""

    def __post_init__(self) -> None:
        check_scales([self.mean], [self.std])


def check_scales(means: Sequence[float], deviations: Sequence[float]) -> None:
    """Reject means and standard deviations that would turn numbers into NaN or infinity.

    Raises:
        ValueError: a mean is not finite, or a standard deviation is not finite or not above 0.
    """
    bad = [each for each in means if not math.isfinite(each)]
    bad += [each for each in deviations if not 0 < each < math.inf]
    if bad:
        raise ValueError(f"expected finite means and standard deviations above 0, got {bad[0]}")


class RunFacts(msgspec.Struct):
    """The entries of a run's ``run.json`` that its use needs."""

    job: str
    data: str = ""
    classes: tuple[str, ...] = ()
    score: str = ""
    class_counts: tuple[list[int], list[int]] | None = None
    train_samples: int = 0
    test_samples: int = 0
    run: Path = Path()
    """Folder of the run."""
    target: Target = Target()
    """Target of the predictions, for jobs that predict classes or a number."""

    def known(self, label: Label) -> bool:
        """Whether the run knows all classes of a label; always true for numbers."""
        return all(name in self.classes for name in parts_of(label))

    def divided(self, labels: Sequence[Label]) -> Sequence[Label]:
        """Split multi-label strings as in training, at a separator that no class contains."""
        if self.target.task != "multi-label":
            return labels
        sign = separator(labels, spaces=False) or " "
        sign = "" if any(sign in name for name in self.classes) else sign
        return [divided(label, sign) for label in labels]


@dataclass(frozen=True, slots=True)
class LoadedModel:
    """The model of a run, and its preprocessing."""

    model: nn.Module
    """Model whose parameter names match the run's weights."""
    module: nn.Module
    """Callable that maps a batch to logits."""
    preprocess: Callable[[Sequence[Any]], Batch]
    """Makes a batch from a list of inputs."""
    description: dict[str, Any]
    """Classes and preprocessing, for programs without onefold."""


Predicted = tuple[list[dict[str, Any]], Measured]
"""Prediction rows, one per sample, and the measurements that they were made from."""


class _Kept(msgspec.Struct):
    """The entries of ``run.json`` that every use of a run needs."""

    shards: Annotated[int, msgspec.Meta(ge=1, le=MOST_SHARDS)]


@dataclass(frozen=True, slots=True)
class Use:
    """Everything that a device needs to use a run."""

    run: Path
    weights: Path
    inputs: list[Input]
    options: PredictOptions
    compute: Callable[[Use], Predicted]
    """`Job.predict` or `Job.score`, which makes the rows."""
    scored: bool = False
    """Whether the rows are for scores, which requires labeled inputs."""
    arrays: ArrayPictures | None = None
    """Images that are not stored in files."""

    def measured(
        self,
        model: nn.Module,
        measure: Callable[[nn.Module, Any], Measured],
        data: Any,
        collate: Callable[[list[Any]], Any] | None,
        batch_size: int = 256,
    ) -> Measured:
        """Load the weights into the model, and run ``measure`` on all data without training."""
        load_finite(model, self.weights)
        *others, last = model.parameters()
        # A trainer allocates gradient memory for trainable parameters, and requires at least one.
        for parameter in others:
            parameter.requires_grad_(False)
        # The same shards as in training, so that the same number of devices can share a batch.
        shards = read_run(self.run, shape=_Kept)["shards"]
        optimizer = torch.optim.SGD([last], lr=0.0)
        return onefold.Trainer(model, optimizer, _no_loss, shards=shards).predict(
            measure,
            data,
            batch_size=self.options.batch_size or batch_size,
            workers=self.options.workers,
            collate=collate,
        )


def _no_loss(model: nn.Module, batch: Any) -> torch.Tensor:
    raise NotImplementedError("prediction has no training step")


class Prepare(Protocol):
    """Type of `Job.prepare`."""

    def __call__(self, options: Any, /, scanning: Scanning | None = None) -> Any: ...


@dataclass(frozen=True, slots=True, kw_only=True)
class Job:
    """A ready-made job. The functions are listed in the order of their calls.

    ``onefold train`` calls `check_early` to `make_task`, ``onefold predict`` calls `read` and
    `predict`, and ``onefold evaluate`` calls `labeled`, `tested`, `score` and `sum_up`. Every
    device calls `make_task`, `predict` and `score`; the process of the command calls all others.
    """

    name: str
    help: str
    """Description of the job, in one line."""
    example: str
    """Name of a data folder, for the examples in the help."""
    options: type[Any]
    """Class of the job's options, derived from `TrainOptions`."""
    check_early: Callable[[Any], None]
    """Rejects options that cannot work, before the data are read."""
    prepare: Prepare
    """Reads the data, and rejects data that cannot be used."""
    settle: Callable[[Any, Any], Any]
    """Fills in options without a value, once the data are known."""
    make_task: Callable[[Any, Any], Task]
    """Builds the model, the loss, the scores and the datasets."""
    sample: Literal["image", "text"]
    """Type of a sample, which determines the column of a table to read."""
    read: Callable[[Path, Sequence[Path], Columns], tuple[list[Input], list[BadFile]]]
    """Finds the samples below paths, for a run; also returns unreadable ones."""
    predict: Callable[[Use], Predicted]
    """Predicts the inputs."""
    labeled: Callable[[Path, Path, RunFacts, EvaluateOptions], Labeled]
    """Finds the labeled samples of a dataset, for a run."""
    score: Callable[[Use], Predicted]
    """Predicts labeled inputs."""
    sum_up: Callable[[Measured, list[Label], RunFacts], dict[str, Any]]
    """Computes scores from measurements and labels: fields of an `Evaluation`."""
    tested: Callable[[Any], Iterable[tuple[Path, int]]]
    """Path and line of each test sample of a run with these data."""
    load: Callable[[Path], LoadedModel]
    """Builds the model of a run, with freshly initialized weights."""
    noise: Callable[[], Sequence[Any]]
    """Makes two or more arbitrary inputs, to compare an exported model with the original."""
    free: tuple[int, ...] = (0,)
    """Dimensions of a batch with a dynamic size."""
    files: tuple[str, ...] = ()
    """Files of a run that an exported model needs."""
    draws: bool = False
    """Whether predictions are masks, which are written to a folder."""


def columns_of(run: Path, kind: Literal["image", "text"], options: PredictOptions) -> Columns:
    """Return the columns that were named, or else the columns that a run was trained on.

    Args:
        run: folder of the run.
        kind: type of the samples.
        options: options with the column names.

    Raises:
        DataError: the run's ``run.json`` is damaged.
    """
    kept = read_run(run).get("columns")
    with kept_facts(run):
        columns = msgspec.convert(kept, Columns) if kept else Columns(kind)
    named = options.text_column if kind == "text" else options.image_column
    return columns._replace(sample=named or columns.sample)
