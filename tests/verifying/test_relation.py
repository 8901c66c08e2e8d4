"""The kind of a loss shows in the losses of parts of a batch."""

from __future__ import annotations

import math
from collections.abc import Callable

from onefold.verifying.mathematics import PARTS, Relation, relation_of
from tests.tables import for_each

LOSSES = {"A": [0.3, 1.2], "B": [0.7], "C": [2.0, 0.1, 0.4]}
WEIGHTS = {"A": [1.0, 5.0], "B": [2.0], "C": [3.0, 1.0, 0.0]}
SAMPLES = {part: len(values) for part, values in LOSSES.items()}
Values = list[float]


def mean(losses: Values) -> float:
    return sum(losses) / len(losses)


@for_each(
    ("loss", "relation"),
    [
        (lambda losses, _: mean(losses), "mean"),
        (lambda losses, _: sum(losses), "sum"),
        (lambda losses, by: sum(map(float.__mul__, losses, by)) / sum(by), "weighted"),
        (lambda losses, _: math.log(sum(map(math.exp, losses))) - mean(losses), "dependent"),
        (lambda losses, _: mean([(x - mean(losses)) ** 2 for x in losses]) + 1, "dependent"),
        (lambda losses, _: 0.0, "unclear"),
        (lambda losses, _: 0.7, "mean"),
        (lambda losses, _: math.nan if len(losses) == 1 else 1.0, "unclear"),
    ],
)
def test_the_kind_of_a_loss(loss: Callable[[Values, Values], float], relation: Relation) -> None:
    losses = {
        part: loss([x for p in part for x in LOSSES[p]], [w for p in part for w in WEIGHTS[p]])
        for part in PARTS
    }
    assert relation_of(losses, SAMPLES) == relation
