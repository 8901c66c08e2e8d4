"""Sums that are added up as shards come."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from onefold.core.fold import fold_shards
from onefold.core.shard import Plan
from onefold.exchange.stagefold import RunningFold


def named(left: str, right: str) -> str:
    return f"({left}+{right})"


@given(shards=st.integers(1, 40), data=st.data())
def test_any_order_of_coming_adds_in_the_order_of_the_tree(
    shards: int, data: st.DataObject
) -> None:
    running = RunningFold(shards, named)
    for shard in data.draw(st.permutations(range(shards))):
        running.put(shard, str(shard))
    assert running.total == fold_shards(list(map(str, range(shards))), named)
    assert running.kept == 1


@given(power=st.integers(0, 3), rounds=st.integers(1, 16))
def test_rounds_of_a_power_of_two_keep_one_sum_for_each_level_above(
    power: int, rounds: int
) -> None:
    plan = Plan((rounds,) * 2**power, in_rounds=True)
    running, in_order = RunningFold(plan.shards, named), RunningFold(plan.shards, named)
    for row in plan.rounds():
        for shard in row.values():
            running.put(shard, str(shard))
            # From left to right, one for each level.
            in_order.put(shard, str(shard))
            assert in_order.kept <= max(1, (plan.shards - 1).bit_length())
        assert running.kept <= max(1, (rounds - 1).bit_length())


def test_a_shard_comes_once_and_what_has_not_come_is_named() -> None:
    running = RunningFold(3, named)
    running.put(0, "a")
    for shard in (0, 3, -1):
        with pytest.raises(ValueError, match=f"got shard {shard}"):
            running.put(shard, "b")
    running.put(2, "c")
    with pytest.raises(KeyError, match="shard 1 has not come"):
        running.total  # noqa: B018
