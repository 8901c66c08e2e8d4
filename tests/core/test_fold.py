from __future__ import annotations

from itertools import pairwise

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from onefold.core.fold import Block, blocks_of, fold, fold_shards, max_blocks, published_by
from onefold.core.shard import Plan


@st.composite
def plans(draw: st.DrawFn, most: int = 33) -> Plan:
    """Plans of any counts, in rounds and not."""
    shards = draw(st.integers(1, most))
    devices = draw(st.integers(1, min(shards, 9)))
    cuts = sorted(
        draw(st.lists(st.integers(0, shards), min_size=devices - 1, max_size=devices - 1))
    )
    bounds = [0, *cuts, shards]
    return Plan(tuple(b - a for a, b in pairwise(bounds)), in_rounds=draw(st.booleans()))


def is_node(block: Block, shards: int) -> bool:
    """Whether a block is an aligned power-of-two range, clipped to the number of shards."""
    width = 1
    while width <= 2 * shards:
        if block.start % width == 0 and block.stop == min(block.start + width, shards):
            return True
        width *= 2
    return False


@given(shards=st.integers(1, 70), data=st.data())
def test_any_range_splits_into_whole_blocks_that_cover_it_once(
    shards: int, data: st.DataObject
) -> None:
    start = data.draw(st.integers(0, shards))
    stop = data.draw(st.integers(start, shards))
    blocks = blocks_of(range(start, stop), shards)
    assert [s for block in blocks for s in range(*block)] == list(range(start, stop))
    assert all(is_node(block, shards) for block in blocks)
    assert len(blocks) <= max_blocks(shards)


@given(plan=plans(), data=st.data())
def test_any_plan_folds_to_the_same_bits(plan: Plan, data: st.DataObject) -> None:
    numbers = st.floats(-(2.0**90), 2.0**90, width=32)
    values = [torch.tensor(data.draw(numbers)) for _ in range(plan.shards)]
    alone = fold_shards(values, torch.add)
    parts = {block: fold_shards_in(block, values) for block in published_by(plan)}
    together = fold(parts.get, Block(0, plan.shards), torch.add)
    assert together.numpy().tobytes() == alone.numpy().tobytes()


def fold_shards_in(block: Block, values: list[torch.Tensor]) -> torch.Tensor:
    """A device's part: it only ever asks for single shards."""

    def leaf(node: Block) -> torch.Tensor | None:
        return values[node.start] if node.stop - node.start == 1 else None

    return fold(leaf, block, torch.add)


@given(plan=plans())
def test_any_plan_adds_in_the_same_order(plan: Plan) -> None:
    names = [str(shard) for shard in range(plan.shards)]

    def add(left: str, right: str) -> str:
        return f"({left}+{right})"

    def leaf(node: Block) -> str | None:
        return names[node.start] if node.stop - node.start == 1 else None

    parts = {block: fold(leaf, block, add) for block in published_by(plan)}
    assert fold(parts.get, Block(0, plan.shards), add) == fold_shards(names, add)


def test_the_order_is_a_binary_tree_over_shard_numbers() -> None:
    order = fold_shards(list("abcdefg"), lambda x, y: f"({x}{y})")
    assert order == "(((ab)(cd))((ef)g))"


def test_the_order_is_not_that_of_a_plain_sum() -> None:
    values = [torch.tensor(v) for v in (1e8, 1.0, -1e8, 1.0)]
    assert fold_shards(values, torch.add) != sum(values)


def test_as_many_devices_as_shards_publish_one_sum_each() -> None:
    places = published_by(Plan.even(shards=7, devices=7))
    assert sorted(place.device for place in places.values()) == list(range(7))
    assert all(place.slot == 0 for place in places.values())


def test_a_shard_that_nobody_publishes_is_noticed() -> None:
    parts = {Block(0, 1): 1.0}
    with pytest.raises(KeyError, match="no part covers shard 1"):
        fold(parts.get, Block(0, 2), lambda a, b: a + b)
