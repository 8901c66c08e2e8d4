"""The divisor of a step's loss, from what each shard says of it. Pure.

Note: codes below 0
-------------------
A weight is never negative, so the place of a shard's weight also says when there is none: ``SUM``
where the loss is not divided, ``several(n)`` where it has n terms with a divisor each. Several
divisors must be known before backward can begin, so such a step is begun again: the loss is first
computed without gradients for its weights, these are traded, and then the shards run with them.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from onefold.core.fold import fold_shards
from onefold.errors import LossError

__all__ = ["SUM", "StepWeight", "several", "total_weight"]

SUM = -1.0


@dataclass(frozen=True, slots=True)
class StepWeight:
    """What the step's totals are divided by."""

    value: float
    """Sum of the shards' weights, or 1 where the loss is not divided."""
    divided: bool = True
    """Whether it is."""
    terms: int = 1
    """Terms with a divisor each; where there are several, nothing has been computed yet."""


def several(terms: int) -> float:
    """What stands for a loss of so many terms."""
    return -1.0 - terms


def total_weight(weights: Sequence[float], sizes: Sequence[int], step: int) -> StepWeight:
    """Add up the weights in the fold's order.

    Args:
        weights: (V,) of the shards; 0 of empty ones.
        sizes: (V,) samples of the shards.
        step: for errors.

    Raises:
        LossError: some shards' losses are divided and others' are not.
    """
    filled = [weight for weight, size in zip(weights, sizes, strict=True) if size]
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
