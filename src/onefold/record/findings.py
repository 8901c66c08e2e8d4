"""What stands out in a run: in its record, and in a step that is computed once more.

`first_departure` finds the first step that leaves the run's own history. `Inspection` asks for a
step to be computed again, and `Findings` has what that shows.

Note: the rule
--------------
A number is compared with those of the 50 steps before it. It stands out if it is not finite, or if
it lies further above their median than 8 times their spread. The spread is the median absolute
deviation times 1.4826, which is the standard deviation of normal numbers; and at least 5% of the
median. Both medians stay what they are where a few of the numbers are far off (Hampel, "The
influence curve and its role in robust estimation", 1974). At least 10 numbers are a history.

The loss of each shard is compared in the same way, with those of all shards of these steps and of
its own: one bad sample moves the loss of its shard V times as far as that of the batch, and the
first steps have a history so. There are V times as many of them, of fewer samples each, so 20 times
the spread is asked for.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
from msgspec import Struct

from onefold.record import Record, shards_of
from onefold.record.entries import FailureEntry, StepEntry
from onefold.shard.operations import ShardOperation

__all__ = [
    "RULE",
    "Departure",
    "Findings",
    "Inspection",
    "LayerFinding",
    "SampleFinding",
    "ShardFinding",
    "first_departure",
]


class Inspection(Struct, frozen=True, kw_only=True):
    """What is to be looked at."""

    record: str
    """File of the record; empty where there is none to compare with."""
    step: int
    trainer: int = 0
    """Number of the Trainer among those of the script."""
    shards: list[int] | None = None
    """Which shards are computed once more, operation by operation; None for all."""
    samples: bool = True
    """Whether the samples of these shards are told apart."""
    digests: bool = False
    """Whether each operation of them, and each parameter before each step, is digested."""
    after: int = 0
    """After which step the Trainer stands when it is made; 0 where the run begins."""
    scale: float = 0.0
    """What losses are multiplied by, in a precision that needs it; 0 for what the run has."""
    bundle: str = ""
    """File in which the step is put, to be computed elsewhere; empty for none."""
    function: str = ""
    """``FILE:NAME`` of a function to call with the step; empty for none."""
    terminal: str = ""
    """The terminal at which a Python prompt is opened in the step; empty for none."""
    findings: str
    """File in which the lead writes what is found."""


class SampleFinding(Struct, frozen=True, kw_only=True):
    """A sample of a shard."""

    place: int
    """In the batch."""
    number: int | None
    """In the data set; None of a batch of the script's own."""
    loss: float | None
    """None where it is not known, or not finite."""
    finite: bool
    """Whether its loss, and its gradient where that was looked at, are finite."""
    words: str
    """What it holds, and what the data set says of it."""
    digest: str = ""
    """Of what it holds; empty where none was asked for."""


class LayerFinding(Struct, frozen=True, kw_only=True):
    """The gradient of a parameter, over the whole batch."""

    name: str
    norm: float | None
    """None where it is not finite."""
    given: bool
    """Whether there is a gradient."""
    of_parameter: float | None
    """The norm of the parameter itself."""


class ShardFinding(Struct, frozen=True, kw_only=True):
    """A shard that was computed once more by itself."""

    shard: int
    total: float | None
    """Its part of the loss; None where it is not finite."""
    equal: bool
    """Whether it has the same bits as in the step."""
    norm: float | None
    """Of its gradient; None where it is not finite."""
    bad_gradients: list[str]
    """Parameters whose gradients are not finite."""
    samples: list[SampleFinding]
    operations: list[ShardOperation]
    first: ShardOperation | None = None
    """The first operation that made something that is not finite, or far too large."""
    times: float | None = None
    """How many times as large as in other shards; None of what is not finite."""


class Findings(Struct, kw_only=True):
    """What was found."""

    step: int
    description: dict[str, str] = {}
    """What the numbers depend on, in words; see `onefold.record.entries.StartEntry`."""
    name: str = ""
    """Of the loss, where there are several."""
    samples: int = 0
    begun: int | None = None
    """After which step the computation began."""
    compared: int = 0
    """How many shards of how many steps were compared with the record."""
    differs: list[str] = []
    """What differs from the record, in the first step that does."""
    loss: float | None = None
    norm: float | None = None
    totals: list[float | None] = []
    weights: list[float] = []
    digests: list[int] = []
    printed: str = ""
    """What the function has printed that was called."""
    made: bool = False
    """Whether the record has the step itself."""
    layers: list[LayerFinding] = []
    shards: list[ShardFinding] = []
    parameters: dict[int, dict[str, str]] = {}
    """Digests of the model's tensors before each step, if they were asked for."""


_WINDOW, _LEAST = 50, 10
_SPREADS, _SPREADS_OF_SHARD = 8.0, 20.0
_LEAST_SPREAD = 0.05
RULE = (
    f"not finite, or above the median of the {_WINDOW} steps before by more than {_SPREADS:.0f} "
    f"times their spread (1.4826 times the median absolute deviation, at least "
    f"{_LEAST_SPREAD:.0%} of the median); the loss of a shard, above that of all shards of these "
    f"steps by more than {_SPREADS_OF_SHARD:.0f} times"
)


class Departure(NamedTuple):
    """A number of a step that stands out."""

    step: int
    what: str
    """``loss``, ``norm``, ``loss of shard N``, or the name of a value that the loss returned."""
    value: float
    usual: float
    """The median of the steps before; NaN where there is none."""
    spread: float
    text: str = ""
    """The error that ended the step; empty where the step was made."""


def first_departure(record: Record) -> Departure | None:
    """The first step in which a loss, norm or value stands out; None if none does.

    Steps of several losses are compared with those of the same loss. Fewer samples give larger
    numbers by chance, so a batch of less than half the usual size counts only where no other step
    stands out, or with numbers that are not finite.
    """
    sizes = record.steps["samples"]
    short = 2 * sizes < np.median(sizes) if len(sizes) else np.zeros(0, bool)
    finite = np.isfinite(record.steps["loss"]) & np.isfinite(record.steps["norm"])
    return _first_of(record, ~(short & finite)) or _first_of(record, np.ones(len(sizes), bool))


def _first_of(record: Record, counted: np.ndarray) -> Departure | None:
    """The first that stands out of the steps for which ``counted``, (steps,) bool, is true."""
    steps, found = record.steps, []
    looked = set(steps["step"][counted].tolist())
    names = [name for name in steps if name in ("loss", "norm") or name.startswith("value.")]
    for loss in dict.fromkeys(steps["name"].tolist()):
        # A batch without weight has no loss, and is skipped for that.
        rows = np.flatnonzero((steps["name"] == loss) & (steps["weight"] > 0) & counted)
        for name in names:
            which = rows if name != "norm" else rows[~_lacks(steps, rows)]
            found.append(_first(steps["step"][which], steps[name][which].astype(float), name))
        entries = [each for each in record.by_step.values() if each.step in looked]
        found.append(_first_shard([each for each in entries if each.name == loss]))
    for entry in record.entries:
        if isinstance(entry, FailureEntry):
            text = f"{entry.error}: {entry.text}"
            found.append(Departure(entry.step + 1, "loss", math.nan, math.nan, math.nan, text))
    return min(filter(None, found), default=None, key=lambda each: (each.step, each.what))


def _lacks(steps: dict[str, np.ndarray], rows: np.ndarray) -> np.ndarray:
    """Which steps have no norm, as they were skipped for another reason than the norm itself."""
    skipped = steps["skipped"][rows] != ""
    none = np.isnan(steps["norm"][rows]) & np.isfinite(steps["loss"][rows])
    # The scale of the losses is lowered now and then until no gradient overflows.
    scaled = np.char.startswith(steps["skipped"][rows].astype(str), "a gradient overflowed")
    lacks: np.ndarray = (skipped & none) | scaled
    return lacks


def _first_shard(entries: Sequence[StepEntry]) -> Departure | None:
    means = [_means(entry) for entry in entries]
    for place, own in enumerate(means):
        near = np.concatenate(means[max(0, place - _WINDOW) : place + 1])
        near = near[np.isfinite(near)]
        if len(near) < _LEAST or len(own) < 2:
            continue
        usual, spread = _usual(near)
        largest = int(np.argmax(own))
        if own[largest] - usual > _SPREADS_OF_SHARD * spread:
            what = f"loss of shard {largest}"
            return Departure(entries[place].step, what, float(own[largest]), usual, spread)
    return None


def _means(entry: StepEntry) -> np.ndarray:
    totals, weights, _ = shards_of(entry)
    means: np.ndarray = totals / np.where(weights > 0, weights, 1.0)
    return means


def _usual(values: np.ndarray) -> tuple[float, float]:
    """The median of some numbers, and their spread."""
    usual = float(np.median(values))
    deviation = 1.4826 * float(np.median(np.abs(values - usual)))
    return usual, max(deviation, _LEAST_SPREAD * abs(usual))


def _first(steps: np.ndarray, values: np.ndarray, name: str) -> Departure | None:
    for place, value in enumerate(values.tolist()):
        before = values[max(0, place - _WINDOW) : place]
        before = before[np.isfinite(before)]
        known = len(before) >= _LEAST
        usual, spread = _usual(before) if known else (math.nan, math.nan)
        if math.isfinite(value) and not (known and value - usual > _SPREADS * spread):
            continue
        # A value that was never there, such as one that only some steps return.
        if math.isnan(value) and name.startswith("value.") and not np.isfinite(before).any():
            continue
        what = name.removeprefix("value.")
        return Departure(int(steps[place]), what, value, usual, spread)
    return None
