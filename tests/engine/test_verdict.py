"""What becomes of a step, from its weight and from what devices have said."""

from __future__ import annotations

import dataclasses

import pytest

from onefold.core.head import Said
from onefold.core.weights_of_step import SUM, StepWeight, several, total_weight
from onefold.engine.step import Verdict, verdict_of
from tests.tables import for_each


@for_each("stops", [False, True])
@for_each(
    ("weight", "updates"),
    [
        (StepWeight(3.0), True),
        (StepWeight(5e-324), True),
        (StepWeight(0.0), False),
        (StepWeight(1.0, divided=False), True),
    ],
)
def test_a_step_updates_where_there_is_something_to_count(
    weight: StepWeight, updates: bool, stops: bool
) -> None:
    """Whether the run ends after it is another matter."""
    verdict = verdict_of(weight, Said((0, 0), stops))
    assert verdict == Verdict(
        skipped="" if updates else "the batch's weights add up to 0", stops=stops
    )


@for_each(
    ("weights", "updates"),
    [([2.0, 0.0, 0.0], True), ([0.0, 0.0, 0.0], False), ([SUM, SUM, 0.0], True)],
)
def test_one_shard_with_weight_is_enough(weights: list[float], updates: bool) -> None:
    weight = total_weight(weights, [1, 1, 1 if weights[0] >= 0 else 0], 1)
    assert verdict_of(weight, Said((0,), False)).updates is updates


def test_nothing_is_updated_while_divisors_are_not_known() -> None:
    weight = total_weight([several(2)] * 2, [1, 1], 1)
    assert not verdict_of(weight, Said((0,), False)).updates


def test_what_was_changed_between_two_calls_has_no_part_in_it() -> None:
    said = [Said(changed, True) for changed in ((0, 0), (3, 0))]
    assert len({verdict_of(StepWeight(1.0), each) for each in said}) == 1


def test_a_verdict_is_final() -> None:
    verdict = Verdict(skipped="", stops=False)
    with pytest.raises(dataclasses.FrozenInstanceError, match="skipped"):
        verdict.skipped = "no"  # type: ignore[misc]
