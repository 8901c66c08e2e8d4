"""Finds the divisor of a step's loss from what each shard reports of its own. Pure.

Note: codes below 0
-------------------
A weight is never negative, so a negative number in its place can say that there is none: ``SUM`` if
the loss is not divided, ``several(n)`` if it has n terms with a divisor each, ``GATHERS`` if it
asked for the tensors of other shards, and ``LATE`` if a gradient came after those of its stage had
been handed over. Several divisors must be known before backward can begin, so such a step is
started over: the loss is first computed without gradients, only for its weights; these are traded;
and then the shards run with them. A step that gathers, or was late, is started over as well.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from onefold.core.fold import fold_shards
from onefold.errors import LossError

__all__ = ["GATHERS", "LATE", "SUM", "StepWeight", "several", "total_weight"]

SUM = -1.0
GATHERS = -0.5
"""No whole number, as the codes of terms are."""
LATE = -0.25


@dataclass(frozen=True, slots=True)
class StepWeight:
    """What the totals of a step are divided by."""

    value: float
    """The sum of the shards' weights; 1 if the loss is not divided, NaN if it has several terms."""
    divided: bool = True
    """Whether the loss is divided at all."""
    terms: int = 1
    """Number of terms with a divisor each; if there are several, nothing has been computed yet."""
    gathers: bool = False
    """Whether a shard has asked for the tensors of the others; then nothing has been computed."""
    late: bool = False
    """Whether a shard has handed over a stage too early; then sums are not complete."""


def several(terms: int) -> float:
    """The code that stands for a loss of ``terms`` terms."""
    # One below SUM for a single term, so that no code is SUM itself.
    return -1.0 - terms


def total_weight(weights: Sequence[float], sizes: Sequence[int], step: int) -> StepWeight:
    """Add up the shards' weights in the order of the fold.

    Args:
        weights: (V,) float64 of the shards; 0 for empty ones.
        sizes: (V,) number of samples in each shard.
        step: number of the step, for errors.

    Raises:
        LossError: some shards' losses are divided and others' are not.
    """
    # Empty shards never ran, so they have no opinion on the kind of the loss. In a sum they count
    # as 0, in their place in the tree.
    filled = [weight for weight, size in zip(weights, sizes, strict=True) if size]
    # Before kinds are compared: what a shard that gathers will return is not known yet.
    if GATHERS in filled:
        return StepWeight(math.nan, gathers=True)
    if LATE in filled:
        return StepWeight(math.nan, late=True)
    least = min(filled)
    if least >= 0:
        return StepWeight(fold_shards(list(weights), _add))
    if max(filled) != least:
        kinds = ", ".join(sorted({_words(weight) for weight in filled}))
        raise LossError(
            f"the loss of step {step} is of several kinds: {kinds}. Expected the same kind for "
            f"every shard, also for one in which there is nothing to count"
        )
    if least == SUM:
        return StepWeight(1.0, divided=False)
    return StepWeight(math.nan, terms=int(-1.0 - least))


def _words(weight: float) -> str:
    if weight >= 0:
        return "a mean"
    return "onefold.Sum" if weight == SUM else f"a sum of {int(-1.0 - weight)} terms"


def _add(left: float, right: float) -> float:
    return left + right
