"""A ready-made job: the functions from data to a run, and from a run to its results.

A new job is a file that makes a `Job`, and a line in `onefold_jobs.catalog`. The rest is shared:
the loop, checkpoints, metrics, the report, the commands and their options.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, Literal

import msgspec
import torch
from torch import nn

import onefold
from onefold_jobs.data.files import BadFile
from onefold_jobs.data.labels import Label, TaskName, divided, parts_of, separator
from onefold_jobs.data.pictures import ArrayPictures
from onefold_jobs.data.scan import Scanning
from onefold_jobs.data.tables import Columns
from onefold_jobs.finetune import load_finite
from onefold_jobs.options import COUNT, MOST_SHARDS, again, check_limits, option
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
_OF_RUN = "that of the run, or the one of a usual name"


@dataclass(frozen=True, slots=True, kw_only=True)
class PredictOptions:
    """How to use a run."""

    devices: str = again("devices", "auto")
    output: Path | None = option(
        None, "File for the predictions, or folder for masks.", shown="the screen"
    )
    format: Format | None = option(
        None, "Format of the predictions.", shown="by the ending of --output, or csv"
    )
    json: bool = option(False, "Print JSON: short for --format json.")
    weights: Literal["best", "last"] = option("best", "Checkpoint of the run to use.")
    top: int = option(1, "How many classes to report for each, the surest first.", COUNT)
    batch_size: int | None = again(
        "batch_size", shown="that of the job's evaluation", heading="Devices"
    )
    workers: int = again("workers", 0)
    text_column: str | None = option(
        None, "Column of the texts in a table, or several: title,body.", shown=_OF_RUN
    )
    image_column: str | None = option(
        None, "Column with the paths of the pictures in a table.", shown=_OF_RUN
    )
    skip_bad: bool = option(False, "Leave out what cannot be read, rather than refuse it.")

    def __post_init__(self) -> None:
        check_limits(self)


@dataclass(frozen=True, slots=True, kw_only=True)
class EvaluateOptions(PredictOptions):
    """How to score a run."""

    output: Path | None = option(
        None, "File for the label and the prediction of every sample.", shown="none"
    )
    label_column: tuple[str, ...] = option(
        (), "Column of the labels in a table.", shown="that of the run, or the one of a usual name"
    )
    json: bool = option(False, "Print the scores as JSON.")


@dataclass(frozen=True, slots=True)
class Input:
    """What to predict: a picture, or a line of a text file."""

    path: Path
    name: str
    """The name of the file, counted from the path that was given."""
    text: str = ""
    line: int = 0
    label: Label = ""
    """The name of its class, or what else it is labeled with; empty where that is not known."""
    mask: Path | None = None
    """The mask that it should have, where that is known."""

    @property
    def row(self) -> dict[str, Any]:
        """What its prediction begins with."""
        where = {"line": self.line, "text": self.text} if self.line else {}
        return {"file": self.name, **where}


@dataclass(frozen=True, slots=True)
class Labeled:
    """Samples whose labels are known."""

    where: Path
    inputs: list[Input]
    left_out: list[BadFile]
    arrays: ArrayPictures | None = None
    """The pictures, if they are not in files."""


class Target(msgspec.Struct, frozen=True):
    """What a model's outputs stand for; kept with the model."""

    task: TaskName = "single-label"
    mean: float = 0.0
    """Of the numbers that were trained on: an output of 0 stands for it."""
    std: float = 1.0
    """How far from it a number is with an output of 1."""

    def __post_init__(self) -> None:
        check_scales([self.mean], [self.std])


def check_scales(means: Sequence[float], deviations: Sequence[float]) -> None:
    """Refuse a mean or a standard deviation by which numbers become none.

    Raises:
        ValueError: a mean is not finite, or a standard deviation is not finite or not above 0.
    """
    bad = [each for each in means if not math.isfinite(each)]
    bad += [each for each in deviations if not 0 < each < math.inf]
    if bad:
        raise ValueError(f"expected finite means, and standard deviations above 0, got {bad[0]}")


class RunFacts(msgspec.Struct):
    """What is needed of a run's ``run.json``."""

    job: str
    data: str = ""
    classes: tuple[str, ...] = ()
    score: str = ""
    class_counts: tuple[list[int], list[int]] | None = None
    train_samples: int = 0
    test_samples: int = 0
    run: Path = Path()
    """The folder of the run."""
    target: Target = Target()
    """What is predicted of each sample, where that is classes or a number."""

    def known(self, label: Label) -> bool:
        """Whether a label is of classes of the run, or a number."""
        return all(name in self.classes for name in parts_of(label))

    def divided(self, labels: Sequence[Label]) -> Sequence[Label]:
        """Divide labels of several classes as in training: at a sign that is in no class."""
        if self.target.task != "multi-label":
            return labels
        sign = separator(labels, spaces=False) or " "
        sign = "" if any(sign in name for name in self.classes) else sign
        return [divided(label, sign) for label in labels]


@dataclass(frozen=True, slots=True)
class LoadedModel:
    """The model of a run, and what comes before it."""

    model: nn.Module
    """With the names of the run's weights."""
    module: nn.Module
    """How the model is called: maps a batch to logits."""
    preprocess: Callable[[Sequence[Any]], Batch]
    """Makes a batch of inputs."""
    description: dict[str, Any]
    """Classes and preprocessing, for programs without onefold."""


Predicted = tuple[list[dict[str, Any]], Measured]
"""A row for each sample, and what it was made of."""


class _Kept(msgspec.Struct):
    """What is needed of any run's ``run.json``."""

    shards: Annotated[int, msgspec.Meta(ge=1, le=MOST_SHARDS)]


@dataclass(frozen=True, slots=True)
class Use:
    """What every device needs to use a run."""

    run: Path
    weights: Path
    inputs: list[Input]
    options: PredictOptions
    compute: Callable[[Use], Predicted]
    """Makes the rows: `Job.predict`, or `Job.score`."""
    scored: bool = False
    """Whether the rows are for scores, so that the inputs have labels."""
    arrays: ArrayPictures | None = None
    """The pictures, if they are not in files."""

    def measured(
        self,
        model: nn.Module,
        measure: Callable[[nn.Module, Any], Measured],
        data: Any,
        collate: Callable[[list[Any]], Any] | None,
        batch_size: int = 256,
    ) -> Measured:
        """Load the weights into the model, and measure all data by a trainer without any step."""
        load_finite(model, self.weights)
        *others, last = model.parameters()
        # A trainer sets memory aside for the gradients of all that is trained; something must be.
        for parameter in others:
            parameter.requires_grad_(False)
        # As in training: as many devices may share a batch as could then.
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
    raise NotImplementedError("a run that only predicts makes no step")


@dataclass(frozen=True, slots=True, kw_only=True)
class Job:
    """A ready-made job: its functions, in the order in which they are called.

    ``onefold train`` calls `check_early` to `make_task`, ``onefold predict`` calls `read` and
    `predict`, and ``onefold evaluate`` calls `labeled`, `tested`, `score` and `sum_up`. Every
    device calls `make_task`, `predict` and `score`, the process of the command all others.
    """

    name: str
    help: str
    """One line about the job."""
    example: str
    """A folder of data, for examples in the help."""
    options: type[Any]
    """The class of its options, derived from `TrainOptions`."""
    check_early: Callable[[Any], None]
    """Refuses options that are bound to fail, before the data are read."""
    prepare: Callable[[Any, Scanning], Any]
    """Reads the data, and refuses those that cannot be used."""
    settle: Callable[[Any, Any], Any]
    """Fills in the options that were left open, now that the data are known."""
    make_task: Callable[[Any, Any], Task]
    """Builds the model, the loss, the scores and the data sets."""
    sample: Literal["image", "text"]
    """What a sample is: decides which column of a table has them."""
    read: Callable[[Path, Sequence[Path], Columns], tuple[list[Input], list[BadFile]]]
    """Finds the samples below paths, for a run; also returns those that cannot be read."""
    predict: Callable[[Use], Predicted]
    """Predicts the inputs."""
    labeled: Callable[[Path, Path, RunFacts, EvaluateOptions], Labeled]
    """Finds the labeled samples of data, for a run."""
    score: Callable[[Use], Predicted]
    """Predicts labeled inputs."""
    sum_up: Callable[[Measured, list[Label], RunFacts], dict[str, Any]]
    """Returns the scores of what was measured, given the labels: fields of an `Evaluation`."""
    tested: Callable[[Any], Iterable[tuple[Path, int]]]
    """Path and line of each sample that a run with these data was tested on."""
    load: Callable[[Path], LoadedModel]
    """Builds the model of a run, with fresh weights."""
    noise: Callable[[], Sequence[Any]]
    """Two inputs or more of any content, to compare an exported model by."""
    free: tuple[int, ...] = (0,)
    """The dimensions of a batch that may have any size."""
    files: tuple[str, ...] = ()
    """Names of files of a run that an exported model needs."""
    draws: bool = False
    """Whether predictions are masks, drawn into a folder."""


def columns_of(run: Path, kind: Literal["image", "text"], options: PredictOptions) -> Columns:
    """The columns that were named, and otherwise those of the tables that a run was trained on.

    Args:
        run: folder of the run.
        kind: what the samples are.
        options: the names of columns are read.

    Raises:
        DataError: the run's ``run.json`` is damaged.
    """
    kept = read_run(run).get("columns")
    with kept_facts(run):
        columns = msgspec.convert(kept, Columns) if kept else Columns(kind)
    named = options.text_column if kind == "text" else options.image_column
    return columns._replace(sample=named or columns.sample)
