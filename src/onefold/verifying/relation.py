"""Finds out from the losses of parts of a batch what kind of number a loss is. Pure.

A batch is cut into three parts, A, B and C; the loss is computed of each, of each two, and of all.
A mean over samples, a sum, and a mean by weights of its own (tokens, classes) each have a rule by
which the losses of two parts give that of both. Where none holds, a sample's loss depends on which
other samples are computed with it.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Literal

__all__ = ["PARTS", "Relation", "relation_of", "relative_size"]

Relation = Literal["mean", "sum", "weighted", "dependent", "unclear"]

PARTS = ("A", "B", "C", "AB", "BC", "AC", "ABC")


def relation_of(
    losses: Mapping[str, float], samples: Mapping[str, int], tolerance: float = 1e-7
) -> Relation:
    """Find out what a scalar loss is.

    Args:
        losses: the loss of each of `PARTS`.
        samples: how many samples A, B and C have.
        tolerance: how far, relatively, numbers may differ that ought to be equal.

    >>> samples = {"A": 1, "B": 2, "C": 2}
    >>> of_samples = {"A": [3.0], "B": [1.0, 2.0], "C": [6.0, 0.0]}
    >>> sums = {part: sum(sum(of_samples[p]) for p in part) for part in PARTS}
    >>> relation_of(sums, samples)
    'sum'
    """
    if not all(math.isfinite(losses[part]) for part in PARTS):
        return "unclear"
    scale = max(abs(losses[part]) for part in PARTS)
    if scale == 0:
        return "unclear"

    def same(one: float, other: float) -> bool:
        return abs(one - other) <= tolerance * scale

    # A mean over samples is also one by weights of its own, so the simpler rules come first.
    several = [part for part in PARTS if len(part) > 1]
    if all(same(losses[p], sum(losses[one] for one in p)) for p in several):
        return "sum"
    if all(same(losses[p], _mean(losses, samples, p)) for p in several):
        return "mean"
    # A and B give B's weight, A and C give C's; BC and ABC must then follow.
    b, c = _ratio(losses, "A", "B"), _ratio(losses, "A", "C")
    if b is None or c is None:
        return "unclear"
    weights = {"A": 1.0, "B": b, "C": c}
    if b < 0 or c < 0:
        return "dependent"
    agrees = all(same(losses[p], _mean(losses, weights, p)) for p in ("BC", "ABC"))
    return "weighted" if agrees else "dependent"


def _mean(losses: Mapping[str, float], weights: Mapping[str, float], part: str) -> float:
    total = sum(weights[one] * losses[one] for one in part)
    return total / sum(weights[one] for one in part)


def _ratio(losses: Mapping[str, float], one: str, other: str) -> float | None:
    """Return the weight of the other part relative to the first; None where it does not show.

    Solves both = (one + w * other) / (1 + w) for w.
    """
    both = losses["".join(sorted(one + other))]
    below = both - losses[other]
    above = losses[one] - both
    if abs(below) <= 1e-6 * max(abs(losses[one]), abs(losses[other])):
        return None
    return above / below


def relative_size(norms: Sequence[float], size: float) -> float:
    """Compute a difference over a size.

    Args:
        norms: of the difference, of the folded gradient, and of that of the whole batch.
        size: what the difference is measured by.
    """
    difference, folded, alone = norms
    if math.isfinite(difference):
        return difference / size if size else 0.0
    # NaN compares as neither larger nor smaller, so it must not reach a comparison. In both it is
    # agreement, as for the loss.
    return math.inf if math.isfinite(folded) or math.isfinite(alone) else 0.0
