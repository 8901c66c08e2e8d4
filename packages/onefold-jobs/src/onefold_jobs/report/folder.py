"""Reads and checks a run's folder: options, facts, numbers and examples, as they are at the moment.

A run writes while this reads, and may be killed at any time; what is not there yet is empty. The
numbers are a view of the run's record: of steps and epochs that were made again after a kill, it
has the last ones.

No file is opened through a link: a folder may come from anywhere, and a page, which is made to be
shared, must not show what lies elsewhere on this machine.

What has not the shape that a page needs is refused. A page takes apart what is in the folder: of
anything but a list or a number it would raise an error of Python's that names no file. What is only
shown may be anything.
"""

from __future__ import annotations

import math
from collections import Counter
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

import msgspec
import numpy as np

import onefold
from onefold.errors import DataError, RecordError
from onefold.files import read_plain
from onefold_jobs.options import parse_toml
from onefold_jobs.runfolder import CONFIG, FAULTS, read_object, read_run

__all__ = ["EpochLine", "ReportedRun", "StepsLine", "finite_or_zero", "number", "read_reported"]


_Column = np.ndarray[Any, Any]
_Columns = dict[str, _Column]

_RECORD = "run.record"
_MOST_OPTIONS_BYTES = 1 << 20
_POINTS = 20
"""How many points a curve over steps has in an epoch, at most."""

_Count = Annotated[int, msgspec.Meta(ge=0, lt=1 << 53)]
"""A whole number that is also a float without loss, as a chart needs it."""
_List = list[Any] | None
_Object = dict[Any, Any]
"""Not of texts: msgspec takes none with lone surrogates, which the name of a score may have."""


class StepsLine(msgspec.Struct, frozen=True, kw_only=True):
    """Numbers of some steps of training, up to and including ``step``."""

    step: _Count
    """The last of the steps, counted from 1 over the whole run."""
    loss: float = math.nan
    """Mean over the samples of these steps."""
    lr: float = math.nan
    """Learning rate of the last step."""
    samples_per_s: float = math.nan
    """Training speed; NaN of the first step of an epoch, before which the clock ran for others."""


class EpochLine(StepsLine, frozen=True, kw_only=True):
    """Numbers of one pass over the training set, and of the evaluation after it."""

    epoch: _Count = 0
    """Counted from 0."""
    scores: dict[Any, float] = {}
    """Scores of the test set by name, its loss among them."""
    train_s: float = math.nan
    """Duration of the training."""
    evaluate_s: float = math.nan
    """Duration of the evaluation."""
    devices: list[_Object] = []
    """The name of each ``device``, and the seconds it spent in each phase."""

    @property
    def whole_s(self) -> float:
        """Seconds of training and evaluation together, as far as they were measured."""
        return finite_or_zero(self.train_s) + finite_or_zero(self.evaluate_s)

    def score(self, name: str) -> float:
        """A score of the test set; NaN where it was not computed."""
        return self.scores.get(name, math.nan)


@dataclass(frozen=True, kw_only=True, slots=True)
class ReportedRun:
    """All that a run's folder holds."""

    folder: Path
    """Where it was read."""
    facts: dict[str, Any]
    """What the run reports of itself: job, model, devices, classes and the like."""
    options: dict[str, Any]
    """What it was started with."""
    steps: tuple[StepsLine, ...]
    """In order of their steps; none at first."""
    epochs: tuple[EpochLine, ...]
    """In order; none until the first has ended."""
    examples: dict[str, Any] | None
    """Predictions of the trained model; None until there are some."""

    @property
    def name(self) -> str:
        """Name of the run; that of its folder if it has none."""
        return str(self.facts.get("name") or self.folder.name)

    @property
    def purpose(self) -> str:
        """The task in words, such as ``Image regression``; empty if the run does not say."""
        return str(self.facts.get("purpose", ""))

    @property
    def classes(self) -> tuple[str, ...]:
        """Names of the classes; none for segmentation."""
        return tuple(map(str, self.facts.get("classes") or ()))

    @property
    def devices_in_words(self) -> str:
        """How many devices of which kind, such as ``2 x cpu``."""
        kinds = Counter(str(name).partition(":")[0] for name in self.facts.get("devices") or ())
        return ", ".join(f"{count} x {kind}" for kind, count in kinds.items())

    @property
    def score_names(self) -> tuple[str, ...]:
        """Scores of the test set other than its loss, in the order they were first given."""
        names = dict.fromkeys(name for epoch in self.epochs for name in epoch.scores)
        return tuple(name for name in names if name != "loss")

    @property
    def target(self) -> str:
        """Name of the score by which the best epoch is chosen."""
        return str(self.facts.get("score") or "lowest loss").partition(" ")[2]

    @property
    def best(self) -> tuple[int, float] | None:
        """The best epoch, counted from 0, and its score; None before the first."""
        best = self.facts.get("best")
        return (best["epoch"], number(best.get("value"))) if best else None

    def baseline(self, name: str) -> float:
        """A score of answering alike for every sample; NaN if there is no such thing."""
        baseline = self.facts.get("baseline")
        return number(baseline["scores"].get(name)) if baseline else math.nan

    @property
    def last_score(self) -> float:
        """The chosen score after the last epoch; NaN before the first."""
        return self.epochs[-1].score(self.target) if self.epochs else math.nan

    @property
    def trained_s(self) -> float:
        """Time of all epochs with their evaluations, without pauses; NaN before the first."""
        return sum(epoch.whole_s for epoch in self.epochs) if self.epochs else math.nan

    @property
    def samples_per_s(self) -> float:
        """Training speed of all epochs together; of the last steps before the first has ended."""
        # Samples over seconds; the mean of the epochs' speeds would weigh short epochs too much.
        measured = [(e.samples_per_s * e.train_s, e.train_s) for e in self.epochs]
        measured = [pair for pair in measured if math.isfinite(pair[0]) and pair[1] > 0]
        if measured:
            return sum(samples for samples, _ in measured) / sum(time_s for _, time_s in measured)
        return self.steps[-1].samples_per_s if self.steps else math.nan


def read_reported(folder: Path) -> ReportedRun:
    """Read what a run's folder holds at the moment.

    Args:
        folder: the folder of one run.

    Returns:
        The run; what it has not written yet is empty.

    Raises:
        DataError: the folder is not that of a run, or a file in it cannot be read.
    """
    path = folder / "examples.json"
    steps, epochs = _read_record(folder)
    return ReportedRun(
        folder=folder,
        facts=read_run(folder, shape=_Facts),
        options=_read_options(folder / CONFIG),
        steps=tuple(steps),
        epochs=tuple(epochs),
        examples=read_object(path, _Examples) if path.is_file() else None,
    )


def number(value: object) -> float:
    """Return a number of a JSON file; NaN for null and for anything but a finite number."""
    # True and False are ints to Python.
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        return math.nan
    try:
        found = float(value)
    except OverflowError:
        return math.nan
    return found if math.isfinite(found) else math.nan


def finite_or_zero(value: float) -> float:
    """Return the value, or 0 if it is not finite, for sums over what was measured."""
    return value if math.isfinite(value) else 0.0


class _Facts(msgspec.Struct):
    """What a page takes apart of ``run.json``."""

    baseline: _Baseline | None = None
    best: _Best | None = None
    class_counts: list[list[_Count]] | None = None
    class_weights: list[float] | None = None
    classes: _List = None
    devices: _List = None
    left_out: _List = None
    notes: _List = None


class _Best(msgspec.Struct):
    epoch: _Count


class _Baseline(msgspec.Struct):
    scores: _Object
    each: str = "sample"


class _Examples(msgspec.Struct):
    """What a page takes apart of ``examples.json``."""

    kind: str | None = None
    classes: _List = None
    confusion: list[list[_Count]] | None = None
    ious: list[_Object] | None = None
    labels: list[_Object] | None = None
    samples: list[_Object] | None = None
    worst: list[_Object] | None = None

    def __post_init__(self) -> None:
        counts, classes = self.confusion or [], self.classes or []
        sides = {len(counts), *map(len, counts), *({len(classes)} if counts and classes else ())}
        if len(sides) > 1:
            raise ValueError(
                f"a confusion matrix should have a row and a column for each class, and has "
                f"lengths of {', '.join(map(str, sorted(sides)))}"
            )


def _read_options(path: Path) -> dict[str, Any]:
    try:
        return parse_toml(read_plain(path, _MOST_OPTIONS_BYTES))
    except (OSError, ValueError) as error:
        raise DataError(f"{path}: expected TOML, got: {error}; mend the file") from None


def _read_record(folder: Path) -> tuple[list[StepsLine], list[EpochLine]]:
    try:
        record = onefold.Record(folder)
        return _steps_of(record), _epochs_of(record)
    except FileNotFoundError:
        return [], []
    except (RecordError, *FAULTS) as error:
        raise DataError(
            f"{folder / _RECORD}: expected the record of a run of onefold train, got: {error}"
        ) from error


def _steps_of(record: onefold.Record) -> list[StepsLine]:
    """Each epoch's steps in up to 20 parts."""
    told = record.steps
    starts = np.flatnonzero(np.diff(told["epoch"], prepend=math.nan))
    # Before the first of an epoch lies an evaluation, before the first of a resumed run a pause.
    took_s = np.diff(told["time"], prepend=math.nan)
    took_s[starts] = math.nan
    took_s[np.isin(told["step"], [each["step"] + 1 for each in record.begins])] = math.nan
    epochs = np.split(np.arange(len(took_s)), starts[1:])
    parts = [part for rows in epochs for part in np.array_split(rows, min(_POINTS, len(rows)) or 1)]
    return [_line_of(told, took_s, rows) for rows in parts if len(rows)]


def _line_of(told: _Columns, took_s: _Column, rows: _Column) -> StepsLine:
    samples, timed = told["samples"], rows[took_s[rows] > 0]
    return StepsLine(
        step=int(told["step"][rows[-1]]),
        loss=float(np.average(told["loss"][rows], weights=samples[rows])),
        lr=float(told["rate.0"][rows[-1]]),
        samples_per_s=float(samples[timed].sum() / took_s[timed].sum()) if len(timed) else math.nan,
    )


def _epochs_of(record: onefold.Record) -> list[EpochLine]:
    """What the devices have told of each epoch."""
    # A resumed run may have other devices: a number has the name that it had last.
    names = {n: name for begun in record.begins for n, name in enumerate(begun["devices"])}
    # By epoch: one that ended early by --max-time was evaluated once more when it had resumed.
    lines: dict[int, EpochLine] = {}
    scores = {}
    for each in record.results:
        # Runs of earlier versions have their scores here.
        if each["call"] == "trainer.evaluate":
            scores = each["value"]
        if each["call"] != "trainer.gather":
            continue
        told = each["value"]
        line = {"scores": scores, **told[0], "epoch": int(told[0]["epoch"]), "step": each["step"]}
        line["devices"] = [{**each, "device": names[n]} for n, each in enumerate(told)]
        lines[line["epoch"]] = msgspec.convert(line, EpochLine)
    return [*lines.values()]
