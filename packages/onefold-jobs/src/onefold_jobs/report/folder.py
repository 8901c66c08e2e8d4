"""Reads and validates a run's folder: current options, facts, numbers and examples.

The run may be writing at the same time, and may be killed at any time; missing parts are empty. The
numbers are a view of the run's record: for steps and epochs that were repeated after a kill, it
contains the last ones.

No file is opened through a link: a folder may come from anywhere, and a page, which is made to be
shared, must not reveal other files of this machine.

Content whose structure does not match is rejected, because a page that accessed, for example, a
string instead of a list would raise an error that names no file. Content that is only displayed may
be anything.
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
from onefold_jobs.scores import Baseline, verdict_of

__all__ = ["EpochLine", "ReportedRun", "StepsLine", "finite_or_zero", "number", "read_reported"]


_Column = np.ndarray[Any, Any]
_Columns = dict[str, _Column]

_RECORD = "run.record"
_MOST_OPTIONS_BYTES = 1 << 20
_POINTS = 20
"""Maximum number of points per epoch in a curve over steps."""

_Count = Annotated[int, msgspec.Meta(ge=0, lt=1 << 53)]
"""An integer that a float represents exactly, as charts require."""
_List = list[Any] | None
_Object = dict[Any, Any]
"""Keys are not strings: msgspec rejects lone surrogates, which a score's name may contain."""


class StepsLine(msgspec.Struct, frozen=True, kw_only=True):
    """Metrics of some training steps, up to and including ``step``."""

    step: _Count
    """Last of the steps, counted from 1 over the whole run."""
    loss: float = math.nan
    """Mean loss over the samples of these steps."""
    lr: float = math.nan
    """Learning rate of the last step."""
    samples_per_s: float = math.nan
    """Training speed; NaN for the first step of an epoch, whose time includes other work."""


class EpochLine(StepsLine, frozen=True, kw_only=True):
    """Metrics of a pass over the training set, and of the evaluation after it."""

    epoch: _Count = 0
    """Number of the epoch, from 1."""
    scores: dict[Any, float] = {}
    """Test scores by name, including the loss."""
    train_s: float = math.nan
    """Duration of the training, in seconds."""
    evaluate_s: float = math.nan
    """Duration of the evaluation, in seconds."""
    devices: list[_Object] = []
    """Name of each ``device``, and its seconds in each phase."""

    @property
    def whole_s(self) -> float:
        """Seconds of training and evaluation together, as far as measured."""
        return finite_or_zero(self.train_s) + finite_or_zero(self.evaluate_s)

    def score(self, name: str) -> float:
        """Return a test score; NaN if it was not computed."""
        return self.scores.get(name, math.nan)


@dataclass(frozen=True, kw_only=True, slots=True)
class ReportedRun:
    """Content of a run's folder."""

    folder: Path
    """Path of the folder."""
    facts: dict[str, Any]
    """Facts of the run: job, model, devices, classes and so on."""
    options: dict[str, Any]
    """Options of the run."""
    steps: tuple[StepsLine, ...]
    """Metrics in order of steps; empty at first."""
    epochs: tuple[EpochLine, ...]
    """Epochs in order; empty until the first one has ended."""
    examples: dict[str, Any] | None
    """Predictions of the trained model; None until there are some."""

    @property
    def name(self) -> str:
        """Name of the run, or of its folder."""
        return str(self.facts.get("name") or self.folder.name)

    @property
    def purpose(self) -> str:
        """The task in words, such as ``Image regression``; empty if unknown."""
        return str(self.facts.get("purpose", ""))

    @property
    def classes(self) -> tuple[str, ...]:
        """Class names; empty without classes."""
        return tuple(map(str, self.facts.get("classes") or ()))

    @property
    def devices_in_words(self) -> str:
        """Number of devices of each kind, such as ``2 x cpu``."""
        kinds = Counter(str(name).partition(":")[0] for name in self.facts.get("devices") or ())
        return ", ".join(f"{count} x {kind}" for kind, count in kinds.items())

    @property
    def score_names(self) -> tuple[str, ...]:
        """Names of the test scores other than the loss, in order of appearance."""
        names = dict.fromkeys(name for epoch in self.epochs for name in epoch.scores)
        return tuple(name for name in names if name != "loss")

    @property
    def target(self) -> str:
        """Name of the score that selects the best epoch."""
        return str(self.facts.get("score") or "lowest loss").partition(" ")[2]

    @property
    def best(self) -> tuple[int, float] | None:
        """Best epoch, from 1, and its score; None before the first one."""
        best = self.facts.get("best")
        return (best["epoch"], number(best.get("value"))) if best else None

    def baseline(self, name: str) -> float:
        """Return the score of a constant prediction; NaN if there is none."""
        baseline = self.facts.get("baseline")
        return number(baseline["scores"].get(name)) if baseline else math.nan

    @property
    def warning(self) -> str | None:
        """Headline of a run that learned nothing, as the terminal shows it; None for others."""
        if not self.best or not self.facts.get("baseline"):
            return None
        facts, scores = self.facts["baseline"], {self.target: self.baseline(self.target)}
        baseline = Baseline(str(facts.get("answer")), scores, str(facts.get("each", "sample")))
        return verdict_of(
            str(self.facts.get("score")),
            self.best[1],
            baseline,
            steps=self.steps[-1].step if self.steps else 0,
            examples=self.examples,
            shrunk=bool(self.facts.get("shrunk")),
        )

    @property
    def last_score(self) -> float:
        """The selecting score after the last epoch; NaN before the first one."""
        return self.epochs[-1].score(self.target) if self.epochs else math.nan

    @property
    def trained_s(self) -> float:
        """Duration of all epochs with their evaluations, without pauses; NaN before the first
        one."""
        return sum(epoch.whole_s for epoch in self.epochs) if self.epochs else math.nan

    @property
    def samples_per_s(self) -> float:
        """Training speed over all epochs; of the last steps before the first epoch has ended."""
        # Samples over seconds, because the mean of the epochs' speeds would overweight short
        # epochs.
        measured = [(e.samples_per_s * e.train_s, e.train_s) for e in self.epochs]
        measured = [pair for pair in measured if math.isfinite(pair[0]) and pair[1] > 0]
        if measured:
            return sum(samples for samples, _ in measured) / sum(time_s for _, time_s in measured)
        return self.steps[-1].samples_per_s if self.steps else math.nan


def read_reported(folder: Path) -> ReportedRun:
    """Read the current content of a run's folder.

    Args:
        folder: folder of a run.

    Returns:
        The run; parts that it has not written yet are empty.

    Raises:
        DataError: the folder does not contain a run, or a file in it cannot be read.
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
    """Return a number of a JSON file; NaN for null and anything else that is not a finite
    number."""
    # bool is a subclass of int.
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        return math.nan
    try:
        found = float(value)
    except OverflowError:
        return math.nan
    return found if math.isfinite(found) else math.nan


def finite_or_zero(value: float) -> float:
    """Return the value, or 0 if it is not finite, for sums over measurements."""
    return value if math.isfinite(value) else 0.0


class _Facts(msgspec.Struct):
    """The structure of ``run.json`` that a page accesses."""

    baseline: _Baseline | None = None
    best: _Best | None = None
    class_counts: list[list[_Count]] | None = None
    class_weights: list[float] | None = None
    classes: _List = None
    devices: _List = None
    left_out: _List = None
    notes: _List = None
    remarks: _List = None
    range_test: _RangeTest | None = None


class _RangeTest(msgspec.Struct):
    rates: list[float]
    losses: list[float | None]
    smoothed: list[float | None]
    rate: float


class _Best(msgspec.Struct):
    epoch: _Count


class _Baseline(msgspec.Struct):
    scores: _Object
    each: str = "sample"


class _Confused(msgspec.Struct):
    label: _Count
    predicted: _Count
    samples: list[_Object] | None = None


class _Examples(msgspec.Struct):
    """The structure of ``examples.json`` that a page accesses."""

    kind: str | None = None
    classes: _List = None
    confused: list[_Confused] | None = None
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
                f"a confusion matrix must have one row and one column per class, got "
                f"lengths of {', '.join(map(str, sorted(sides)))}"
            )


def _read_options(path: Path) -> dict[str, Any]:
    try:
        return parse_toml(read_plain(path, _MOST_OPTIONS_BYTES))
    except (OSError, ValueError) as error:
        raise DataError(f"{path}: expected TOML, got: {error}; fix the file") from None


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
    """Summarize each epoch's steps in up to 20 parts."""
    columns = record.steps
    starts = np.flatnonzero(np.diff(columns["epoch"], prepend=math.nan))
    # An evaluation precedes the first step of an epoch, a pause the first one of a resumed run.
    took_s = np.diff(columns["time"], prepend=math.nan)
    took_s[starts] = math.nan
    begins: Any = record.begins
    took_s[np.isin(columns["step"], [each["step"] + 1 for each in begins])] = math.nan
    epochs = np.split(np.arange(len(took_s)), starts[1:])
    parts = [part for rows in epochs for part in np.array_split(rows, min(_POINTS, len(rows)) or 1)]
    return [_line_of(columns, took_s, rows) for rows in parts if len(rows)]


def _line_of(columns: _Columns, took_s: _Column, rows: _Column) -> StepsLine:
    samples, timed = columns["samples"], rows[took_s[rows] > 0]
    return StepsLine(
        step=int(columns["step"][rows[-1]]),
        loss=float(np.average(columns["loss"][rows], weights=samples[rows])),
        lr=float(columns["rate.0"][rows[-1]]),
        samples_per_s=float(samples[timed].sum() / took_s[timed].sum()) if len(timed) else math.nan,
    )


def _epochs_of(record: onefold.Record) -> list[EpochLine]:
    """Collect what the devices recorded of each epoch."""
    # A resumed run may use other devices: a number has the most recent name.
    begins: Any = record.begins
    results: Any = record.results
    names = {n: name for begun in begins for n, name in enumerate(begun["devices"])}
    # Keyed by epoch, because an epoch that --max-time cut short was evaluated again after the
    # resume.
    lines: dict[int, EpochLine] = {}
    scores = {}
    for each in results:
        # Runs of earlier versions store their scores here.
        if each["call"] == "trainer.evaluate":
            scores = each["value"]
        if each["call"] != "trainer.gather":
            continue
        given = each["value"]
        line = {"scores": scores, **given[0], "epoch": int(given[0]["epoch"]), "step": each["step"]}
        line["devices"] = [{**each, "device": names[n]} for n, each in enumerate(given)]
        lines[line["epoch"]] = msgspec.convert(line, EpochLine)
    return [*lines.values()]
