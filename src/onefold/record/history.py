"""Finds the first step of a run that leaves the run's own history. Pure.

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

from onefold.record import Record, shards_of
from onefold.record.entries import FailureEntry, StepEntry

__all__ = ["RULE", "Departure", "first_departure"]

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
