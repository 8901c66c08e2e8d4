"""Reading a run's folder: options, facts, numbers and examples, as they stand at the moment.

A run writes while this reads, and may be killed at any time. What is cut short is left out and
counted; what is not there yet is empty. Numbers that were not finite are NaN.
"""

from __future__ import annotations

import math
import re
import tomllib
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

from onefold.errors import DataError
from onefold.jobs.progress import PHASES
from onefold.system.plainfile import open_plain, parse_json, read_plain

__all__ = ["EpochLine", "Run", "StepsLine", "finite_or_zero", "number", "read_run"]

_BEGINNING = re.compile(r'(?=\{"kind":)')
"""Of a line; a text inside one would have its quotes escaped."""

_MOST_OPTIONS_BYTES = 1 << 20
_LONGEST_LINE_BYTES = 1 << 20
"""Of metrics; what is longer is cut, and counts as lines that cannot be read."""


@dataclass(frozen=True, kw_only=True, slots=True)
class StepsLine:
    """Some steps of training, up to and with ``step``."""

    step: int
    """Of the whole run, counted from 1."""
    loss: float
    """Mean over the samples since the line before."""
    lr: float
    """Learning rate of the last step."""
    samples_per_s: float
    """Training speed."""


@dataclass(frozen=True, kw_only=True, slots=True)
class EpochLine:
    """One pass over the training set and the evaluation after it."""

    epoch: int
    """Counted from 0."""
    step: int
    """The last of the epoch, counted from 1."""
    loss: float
    """Mean training loss of the samples, as they were seen."""
    scores: dict[str, float]
    """Of the test set, by name; its loss is one of them."""
    lr: float
    """Learning rate of the last step."""
    train_s: float
    """Duration of the training."""
    evaluate_s: float
    """Duration of the evaluation."""
    samples_per_s: float
    """Training speed."""
    devices: tuple[tuple[str, dict[str, float]], ...]
    """Name of each device, and the seconds it spent in each phase."""

    @property
    def whole_s(self) -> float:
        """Duration of training and evaluation together, as far as they were measured."""
        return finite_or_zero(self.train_s) + finite_or_zero(self.evaluate_s)

    def score(self, name: str) -> float:
        """A score of the test set; NaN where it was not computed."""
        return self.scores.get(name, math.nan)


@dataclass(frozen=True, kw_only=True, slots=True)
class Run:
    """All that a run's folder says."""

    folder: Path
    """Where it was read."""
    facts: dict[str, Any]
    """What the run says of itself: job, model, devices, classes and the like."""
    options: dict[str, Any]
    """What it was started with."""
    steps: tuple[StepsLine, ...]
    """In order of their steps; none at first."""
    epochs: tuple[EpochLine, ...]
    """In order; none until the first has ended."""
    examples: dict[str, Any] | None
    """Predictions of the trained model; None until there are some."""
    unreadable_lines: int
    """Lines of numbers that were cut short and are left out."""

    @property
    def name(self) -> str:
        """What the run is called."""
        return str(self.facts.get("name") or self.folder.name)

    @property
    def classes(self) -> tuple[str, ...]:
        """Names of the classes; none where pixels are told apart."""
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
    def target(self) -> tuple[bool, str]:
        """Whether more is better, and the score by which the best epoch is chosen."""
        direction, _, name = str(self.facts.get("score") or "lowest loss").partition(" ")
        return direction == "highest", name

    @property
    def best(self) -> tuple[int, float] | None:
        """The best epoch, counted from 0, and its score; None before the first."""
        told = self.facts.get("best")
        if told:
            return int(told["epoch"]), number(told.get("value"))
        highest, name = self.target
        values = [(epoch.score(name), epoch.epoch) for epoch in self.epochs]
        finite = [(value, epoch) for value, epoch in values if math.isfinite(value)]
        if not finite:
            return None
        value, epoch = max(finite, key=lambda pair: pair[0] if highest else -pair[0])
        return epoch, value

    @property
    def last_score(self) -> float:
        """The chosen score after the last epoch; NaN before the first."""
        return self.epochs[-1].score(self.target[1]) if self.epochs else math.nan

    @property
    def trained_s(self) -> float:
        """Time of all epochs with their evaluations, without pauses; NaN before the first."""
        return sum(epoch.whole_s for epoch in self.epochs) if self.epochs else math.nan

    @property
    def samples_per_s(self) -> float:
        """Training speed of all epochs together; of the last steps before the first has ended."""
        measured = [(e.samples_per_s * e.train_s, e.train_s) for e in self.epochs]
        measured = [pair for pair in measured if math.isfinite(pair[0]) and pair[1] > 0]
        if measured:
            return sum(samples for samples, _ in measured) / sum(time_s for _, time_s in measured)
        return self.steps[-1].samples_per_s if self.steps else math.nan


def read_run(folder: Path) -> Run:
    """What a run's folder holds at the moment.

    Args:
        folder: of one run.

    Returns:
        The run; what it has not written yet is empty.

    Raises:
        DataError: the folder is not that of a run, or a file of it cannot be read.
    """
    missing = [name for name in ("run.json", "config.toml") if not (folder / name).is_file()]
    if missing:
        raise DataError(
            f"{folder} is not the folder of a run: there is no {' and no '.join(missing)}; "
            f"give the folder that a training made, such as runs/NAME"
        )
    steps, epochs, unreadable_lines = _read_lines(folder / "metrics.jsonl")
    examples = folder / "examples.json"
    return Run(
        folder=folder,
        facts=_read_object(folder / "run.json"),
        options=_read_options(folder / "config.toml"),
        steps=steps,
        epochs=epochs,
        examples=_read_object(examples) if examples.is_file() else None,
        unreadable_lines=unreadable_lines,
    )


def number(value: object) -> float:
    """A number of a JSON file; NaN for null and for what is no finite number."""
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        return math.nan
    return float(value) if math.isfinite(value) else math.nan


def finite_or_zero(value: float) -> float:
    """For sums over what was measured."""
    return value if math.isfinite(value) else 0.0


def _read_object(path: Path) -> dict[str, Any]:
    try:
        value = parse_json(read_plain(path).decode())
    except (OSError, ValueError) as error:
        raise DataError(f"{path}: expected JSON, got: {error}; run the training again") from None
    if not isinstance(value, dict):
        raise DataError(f"{path}: expected a JSON object, got {type(value).__name__}")
    return value


def _read_options(path: Path) -> dict[str, Any]:
    try:
        return tomllib.loads(read_plain(path).decode())
    except (OSError, RecursionError, ValueError) as error:
        raise DataError(f"{path}: expected TOML, got: {error}; mend the file") from None


def _read_lines(path: Path) -> tuple[tuple[StepsLine, ...], tuple[EpochLine, ...], int]:
    steps: list[StepsLine] = []
    epochs: list[EpochLine] = []
    unreadable_lines = 0
    for line in _lines(path):
        record = _parsed(line)
        if record is None:
            unreadable_lines += 1
        elif record.get("kind") == "steps":
            _append(steps, _steps_line(record))
        elif record.get("kind") == "epoch":
            _append(epochs, _epoch_line(record))
    return tuple(steps), tuple(epochs), unreadable_lines


def _lines(path: Path) -> Iterator[str]:
    """The lines; what a resumed run wrote right behind a line that was cut is one of its own."""
    if path.is_file():
        with open_plain(path) as file:
            while line := file.readline(_LONGEST_LINE_BYTES):
                yield from filter(str.strip, _BEGINNING.split(line.decode(errors="replace")))


def _parsed(line: str) -> dict[str, Any] | None:
    """A line's record; None where the run was killed while it wrote the line."""
    try:
        record = parse_json(line)
    except ValueError:
        return None
    whole = isinstance(record, dict) and isinstance(record.get("step"), int)
    return record if whole else None


_Line = TypeVar("_Line", StepsLine, EpochLine)


def _append(lines: list[_Line], line: _Line) -> None:
    """Add a line; a run that was resumed from before it has written some steps twice."""
    while lines and lines[-1].step >= line.step:
        lines.pop()
    lines.append(line)


def _steps_line(record: dict[str, Any]) -> StepsLine:
    names = ("loss", "lr", "samples_per_s")
    return StepsLine(step=record["step"], **{name: number(record.get(name)) for name in names})


def _epoch_line(record: dict[str, Any]) -> EpochLine:
    names = ("loss", "lr", "train_s", "evaluate_s", "samples_per_s")
    scores = record.get("scores") or {}
    return EpochLine(
        epoch=int(record.get("epoch") or 0),
        step=record["step"],
        scores={str(name): number(value) for name, value in scores.items()},
        devices=tuple(
            (str(each.get("device", "")), {phase: number(each.get(phase)) for phase in PHASES})
            for each in record.get("devices") or ()
        ),
        **{name: number(record.get(name)) for name in names},
    )
