"""Reads and checks a run's folder: options, facts, numbers and examples, as they are at the moment.

A run writes while this reads, and may be killed at any time. A line that is cut short is left out
and counted; what is not there yet is empty. Numbers that were not finite are NaN.

No file is opened through a link: a folder may come from anywhere, and a page, which is made to be
shared, must not show what lies elsewhere on this machine.

`check_facts`, `check_examples` and `is_line` check that the JSON of a run's folder has the shape
that it must have for a page to be made of it. A page takes apart what is in the folder: of anything
but a list or a number it would raise an error of Python's that names no file. What is only shown
may be anything.
"""

from __future__ import annotations

import math
import re
import tomllib
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, TypedDict, TypeVar

import msgspec

from onefold.errors import DataError
from onefold.jobs.progress import PHASES
from onefold.system.ownfiles import nested_too_deeply, open_plain, parse_json, read_plain

__all__ = ["EpochLine", "ReportedRun", "finite_or_zero", "number", "read_run"]


_BEGINNING = re.compile(r'(?=\{"kind":)')
"""Where a line of metrics begins; inside a text of one, the quotes would be escaped."""

_MOST_OPTIONS_BYTES = 1 << 20
_LONGEST_LINE_BYTES = 1 << 20
"""Of metrics; a longer line is read in pieces, which count as lines that cannot be read."""


@dataclass(frozen=True, kw_only=True, slots=True)
class StepsLine:
    """Numbers of some steps of training, up to and including ``step``."""

    step: int
    """The last of the steps, counted from 1 over the whole run."""
    loss: float
    """Mean over the samples since the line before."""
    lr: float
    """Learning rate of the last step."""
    samples_per_s: float
    """Training speed."""


@dataclass(frozen=True, kw_only=True, slots=True)
class EpochLine:
    """Numbers of one pass over the training set, and of the evaluation after it."""

    epoch: int
    """Counted from 0."""
    step: int
    """The last of the epoch, counted from 1."""
    loss: float
    """Mean training loss of the samples, as they were seen."""
    scores: dict[str, float]
    """Scores of the test set by name, its loss among them."""
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
    unreadable_lines: int
    """How many lines of numbers were cut short or damaged, and are left out."""

    @property
    def name(self) -> str:
        """Name of the run; that of its folder if it has none."""
        return str(self.facts.get("name") or self.folder.name)

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
    def target(self) -> tuple[bool, str]:
        """Whether more is better, and the score by which the best epoch is chosen."""
        direction, _, name = str(self.facts.get("score") or "lowest loss").partition(" ")
        return direction == "highest", name

    @property
    def best(self) -> tuple[int, float] | None:
        """The best epoch, counted from 0, and its score; None before the first."""
        # What the run itself decided takes precedence: it kept the weights of that epoch.
        recorded = self.facts.get("best")
        if recorded:
            return recorded["epoch"], number(recorded.get("value"))
        highest, name = self.target
        values = [(epoch.score(name), epoch.epoch) for epoch in self.epochs]
        finite = [(value, epoch) for value, epoch in values if math.isfinite(value)]
        if not finite:
            return None
        # max returns the first of equal values: the earliest epoch that was as good.
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
        # Samples over seconds; the mean of the epochs' speeds would weigh short epochs too much.
        measured = [(e.samples_per_s * e.train_s, e.train_s) for e in self.epochs]
        measured = [pair for pair in measured if math.isfinite(pair[0]) and pair[1] > 0]
        if measured:
            return sum(samples for samples, _ in measured) / sum(time_s for _, time_s in measured)
        return self.steps[-1].samples_per_s if self.steps else math.nan


def read_run(folder: Path) -> ReportedRun:
    """Read what a run's folder holds at the moment.

    Args:
        folder: the folder of one run.

    Returns:
        The run; what it has not written yet is empty.

    Raises:
        DataError: the folder is not that of a run, or a file in it cannot be read.
    """
    missing = [name for name in ("run.json", "config.toml") if not (folder / name).is_file()]
    if missing:
        raise DataError(
            f"{folder} is not the folder of a run: there is no {' and no '.join(missing)}; "
            f"give the folder that a training made, such as runs/NAME"
        )
    steps, epochs, unreadable_lines = _read_lines(folder / "metrics.jsonl")
    facts = _read_object(folder / "run.json")
    check_facts(facts, folder / "run.json")
    path = folder / "examples.json"
    examples = _read_object(path) if path.is_file() else None
    if examples is not None:
        check_examples(examples, path)
    return ReportedRun(
        folder=folder,
        facts=facts,
        options=_read_options(folder / "config.toml"),
        steps=steps,
        epochs=epochs,
        examples=examples,
        unreadable_lines=unreadable_lines,
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
        options = tomllib.loads(read_plain(path, _MOST_OPTIONS_BYTES).decode())
        # By dots in a name, tomllib makes tables within each other without any recursion.
        if nested_too_deeply(options):
            raise ValueError("it is nested too deeply")
        return options
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
        # Lines of other kinds are passed over: a later version may write some.
        elif record.get("kind") == "steps":
            _append(steps, _steps_line(record))
        elif record.get("kind") == "epoch":
            _append(epochs, _epoch_line(record))
    return tuple(steps), tuple(epochs), unreadable_lines


def _lines(path: Path) -> Iterator[str]:
    """Yield the lines of a file of metrics.

    A run that was killed leaves half a line without an end, and the resumed run writes its first
    line right behind. So a line is also divided wherever another one begins.

    Raises:
        DataError: there is something else than a file, or the file cannot be read.
    """
    try:
        with open_plain(path) as file:
            # With a limit, or a file without line ends would be read into memory as one.
            while line := file.readline(_LONGEST_LINE_BYTES):
                yield from filter(str.strip, _BEGINNING.split(line.decode(errors="replace")))
    except FileNotFoundError:
        return
    except OSError as error:
        raise DataError(f"{path}: {error.strerror}; run the training again") from error


def _parsed(line: str) -> dict[str, Any] | None:
    """Parse the record of a line; None if it was cut short, or is not as a run writes it."""
    try:
        record = parse_json(line)
    except ValueError:
        return None
    return record if is_line(record) else None


_Line = TypeVar("_Line", StepsLine, EpochLine)


def _append(lines: list[_Line], line: _Line) -> None:
    """Add a line in place of those that it repeats.

    A run that is resumed goes back to its last checkpoint, and writes the steps since then again.
    """
    # From the end, so that the steps stay in order whatever a file holds.
    while lines and lines[-1].step >= line.step:
        lines.pop()
    lines.append(line)


def _steps_line(record: dict[str, Any]) -> StepsLine:
    names = ("loss", "lr", "samples_per_s")
    return StepsLine(step=record["step"], **{name: number(record.get(name)) for name in names})


def _epoch_line(record: dict[str, Any]) -> EpochLine:
    # By get: what an older version did not write is NaN, and leaves a gap in its curve.
    names = ("loss", "lr", "train_s", "evaluate_s", "samples_per_s")
    scores = record.get("scores") or {}
    return EpochLine(
        epoch=record.get("epoch") or 0,
        step=record["step"],
        scores={str(name): number(value) for name, value in scores.items()},
        devices=tuple(
            (str(each.get("device", "")), {phase: number(each.get(phase)) for phase in PHASES})
            for each in record.get("devices") or ()
        ),
        **{name: number(record.get(name)) for name in names},
    )


_Count = Annotated[int, msgspec.Meta(ge=0, lt=1 << 53)]
"""A whole number that is also a float without loss, as a chart needs it."""
_List = list[Any] | None
_Object = dict[Any, Any]
"""Not of texts: msgspec takes none with lone surrogates, which the name of a score may have."""
_ERRORS = (msgspec.ValidationError, UnicodeEncodeError)
"""What msgspec raises, the second for a text with lone surrogates, in place of another type."""


class _Best(TypedDict):
    epoch: _Count


class _Facts(TypedDict, total=False):
    best: _Best | None
    classes: _List
    devices: _List
    left_out: _List
    notes: _List


class _Examples(TypedDict, total=False):
    kind: str | None
    classes: _List
    confusion: list[list[_Count]] | None
    samples: list[_Object] | None
    worst: list[_Object] | None


class _Steps(TypedDict):
    step: _Count


class _Epoch(_Steps, total=False):
    epoch: _Count | None
    scores: _Object | None
    devices: list[_Object] | None


def check_facts(facts: object, path: Path) -> None:
    """Refuse a ``run.json`` of another shape than a run writes.

    Raises:
        DataError: a fact that is taken apart has the wrong type; the message names the file.
    """
    _check(facts, _Facts, path)


def check_examples(examples: object, path: Path) -> None:
    """Refuse an ``examples.json`` of another shape than a run writes.

    Raises:
        DataError: a part of it has the wrong type, or the confusion matrix another size than the
            classes; the message names the file.
    """
    _check(examples, _Examples, path)
    given: Any = examples
    counts, classes = given.get("confusion") or [], given.get("classes") or []
    sides = {len(counts), *map(len, counts), *({len(classes)} if counts and classes else ())}
    if len(sides) > 1:
        raise DataError(
            f"{path}: expected a confusion matrix with a row and a column for each class, got "
            f"lengths of {', '.join(map(str, sorted(sides)))}; run the training again"
        )


def is_line(record: object) -> bool:
    """Whether a line of metrics has the shape that a run gives it."""
    # Of other kinds too, which a later version may write: all have a step.
    of_epoch = isinstance(record, dict) and record.get("kind") == "epoch"
    try:
        msgspec.convert(record, _Epoch if of_epoch else _Steps)
    except _ERRORS:
        return False
    return True


def _check(value: object, shape: Any, path: Path) -> None:
    try:
        msgspec.convert(value, shape)
    except _ERRORS as error:
        raise DataError(
            f"{path}: expected what a run writes there: {error}; run the training again"
        ) from error
