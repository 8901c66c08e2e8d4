from __future__ import annotations

import math
from collections.abc import Callable, Sequence

from onefold.verifying.mathematics import PARTS, Relation, relation_of
from tests.tables import for_each

LOSSES = {"A": [0.3, 1.2], "B": [0.7], "C": [2.0, 0.1, 0.4]}
WEIGHTS = {"A": [1.0, 5.0], "B": [2.0], "C": [3.0, 1.0, 0.0]}
SAMPLES = {part: len(values) for part, values in LOSSES.items()}


def mean(losses: Sequence[float], weights: Sequence[float]) -> float:
    return sum(losses) / len(losses)


def total(losses: Sequence[float], weights: Sequence[float]) -> float:
    return sum(losses)


def weighted(losses: Sequence[float], weights: Sequence[float]) -> float:
    return sum(a * b for a, b in zip(losses, weights, strict=True)) / sum(weights)


def softmax(losses: Sequence[float], weights: Sequence[float]) -> float:
    return math.log(sum(map(math.exp, losses))) - sum(losses) / len(losses)


def spread(losses: Sequence[float], weights: Sequence[float]) -> float:
    middle = sum(losses) / len(losses)
    return sum((loss - middle) ** 2 for loss in losses) / len(losses) + 1


def nothing(losses: Sequence[float], weights: Sequence[float]) -> float:
    return 0.0


def same(losses: Sequence[float], weights: Sequence[float]) -> float:
    return 0.7


def not_a_number(losses: Sequence[float], weights: Sequence[float]) -> float:
    return math.nan if len(losses) == 1 else 1.0


@for_each(
    ("loss", "relation"),
    [
        (mean, "mean"),
        (total, "sum"),
        (weighted, "weighted"),
        (softmax, "dependent"),
        (spread, "dependent"),
        (nothing, "unclear"),
        (same, "mean"),
        (not_a_number, "unclear"),
    ],
)
def test_the_kind_of_a_loss_shows_in_the_losses_of_its_parts(
    loss: Callable[[Sequence[float], Sequence[float]], float], relation: Relation
) -> None:
    losses = {
        part: loss([x for p in part for x in LOSSES[p]], [w for p in part for w in WEIGHTS[p]])
        for part in PARTS
    }
    assert relation_of(losses, SAMPLES) == relation
