from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from onefold.core.fold import fold_shards
from onefold.core.shard import Plan
from onefold.exchange.stagefold import RunningFold
from tests.tables import for_each


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


@given(shards=st.integers(1, 17), data=st.data())
def test_any_order_of_coming_has_the_same_bits(shards: int, data: st.DataObject) -> None:
    numbers = st.floats(-(2.0**90), 2.0**90, width=32)
    values = [torch.tensor(data.draw(numbers)) for _ in range(shards)]
    expected = fold_shards(values, torch.add)
    running = RunningFold(shards, lambda left, right: left.add_(right))
    for shard in data.draw(st.permutations(range(shards))):
        running.put(shard, values[shard].clone())
    assert running.total.numpy().tobytes() == expected.numpy().tobytes()


@given(shards=st.integers(1, 64))
def test_from_left_to_right_one_sum_is_kept_for_each_level(shards: int) -> None:
    running = RunningFold(shards, named)
    most = 0
    for shard in range(shards):
        running.put(shard, str(shard))
        most = max(most, running.kept)
    assert most <= max(1, (shards - 1).bit_length())


@given(power=st.integers(0, 3), rounds=st.integers(1, 16))
def test_rounds_of_a_power_of_two_keep_one_sum_for_each_level_above(
    power: int, rounds: int
) -> None:
    devices = 2**power
    plan = Plan((rounds,) * devices, in_rounds=True)
    running = RunningFold(plan.shards, named)
    for row in plan.rounds():
        for shard in row.values():
            running.put(shard, str(shard))
        assert running.kept <= max(1, (rounds - 1).bit_length())


def test_what_has_not_come_is_named() -> None:
    running = RunningFold(3, named)
    running.put(0, "a")
    running.put(2, "c")
    with pytest.raises(KeyError, match="shard 1 has not come"):
        running.total  # noqa: B018


@for_each("shard", [0, 3, -1])
def test_a_shard_comes_once(shard: int) -> None:
    running = RunningFold(3, named)
    running.put(0, "a")
    with pytest.raises(ValueError, match=f"got shard {shard}"):
        running.put(shard, "b")
