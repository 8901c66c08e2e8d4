"""The divisor of a step, from what each shard gave."""

from __future__ import annotations

import pytest

from onefold.core.weights_of_step import GATHERS, LATE, SUM, several, total_weight
from onefold.errors import LossError
from tests.tables import for_each


def test_the_divisor_is_the_sum_of_weights_in_the_folds_order() -> None:
    found = total_weight([0.1, 0.2, 0.3], [1, 1, 1], 1)
    assert (found.value, found.divided, found.terms) == ((0.1 + 0.2) + 0.3, True, 1)
    found = total_weight([SUM] * 5, [1] * 5, 1)
    assert (found.value, found.divided, found.terms) == (1.0, False, 1)
    # Empty shards say nothing.
    assert total_weight([SUM, SUM, 0.0], [3, 2, 0], 1).value == 1.0
    assert total_weight([several(3), 0.0], [3, 0], 1).terms == 3
    assert total_weight([0.0, 0.0], [3, 0], 1).value == 0.0


@for_each("other", [2.0, SUM, several(2)])
def test_one_shard_is_enough_to_start_over(other: float) -> None:
    assert total_weight([other, GATHERS, LATE], [1, 1, 1], 1).gathers
    found = total_weight([other, LATE], [1, 1], 1)
    assert found.late
    assert not found.gathers
    assert not total_weight([other, LATE], [1, 0], 1).late


@for_each(
    ("weights", "words"),
    [
        ([SUM, 2.0], r"step 4 is of several kinds: a mean, onefold.Sum\. Expected the same"),
        ([several(2), 2.0], "a mean, a sum of 2 terms"),
        ([several(2), several(3)], "a sum of 2 terms, a sum of 3 terms"),
    ],
)
def test_kinds_that_differ_are_refused(weights: list[float], words: str) -> None:
    with pytest.raises(LossError, match=words):
        total_weight(weights, [1, 1], 4)
