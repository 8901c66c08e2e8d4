"""The order in which shards are added up."""

from itertools import pairwise

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from onefold.core import fold as folding
from onefold.core.fold import Block, additions, fold, fold_shards, published_by
from onefold.core.shard import Shares
from onefold.exchange.reduction import RunningFold


@st.composite
def shares(draw: st.DrawFn, most: int = 33) -> Shares:
    """Shares of any counts, in rounds and not."""
    shards = draw(st.integers(1, most))
    devices = draw(st.integers(1, min(shards, 9)))
    cuts = draw(st.lists(st.integers(0, shards), min_size=devices - 1, max_size=devices - 1))
    counts = tuple(b - a for a, b in pairwise([0, *sorted(cuts), shards]))
    return Shares(counts, in_rounds=draw(st.booleans()))


def named(left: str, right: str) -> str:
    return f"({left}{right})"


@given(shares=shares(), data=st.data())
def test_any_shares_add_in_the_same_order(shares: Shares, data: st.DataObject) -> None:
    names = [f" {shard}" for shard in range(shares.shards)]

    def leaf(node: Block) -> str | None:
        return names[node.start] if node.stop - node.start == 1 else None

    parts = {block: fold(leaf, block, named) for block in published_by(shares)}
    assert fold(parts.get, Block(0, shares.shards), named) == fold_shards(names, named)
    for together in (True, False):
        sums = parts.copy()
        for pairs in additions(shares, together=together):
            assert len({block for pair in pairs for block in pair}) == 2 * len(pairs)
            sums |= {left: named(sums[left], sums[right]) for left, right in pairs}
        assert sums[min(sums)] == fold_shards(names, named)


def test_the_order_is_a_binary_tree_over_shard_numbers() -> None:
    assert fold_shards(list("abcdefg"), named) == "(((ab)(cd))((ef)g))"
    values = [torch.tensor(v) for v in (1e8, 1.0, -1e8, 1.0)]
    assert fold_shards(values, torch.add) != sum(values)


def test_a_shard_that_nobody_publishes_is_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(KeyError, match="no part covers shard 1"):
        fold({Block(0, 1): "a"}.get, Block(0, 2), named)
    monkeypatch.setattr(folding, "published_by", lambda _: {Block(0, 1): None})
    with pytest.raises(KeyError, match="no part covers shard 1"):
        additions.__wrapped__(Shares((1, 1)), together=True)


@given(shards=st.integers(1, 40), data=st.data())
def test_sums_added_as_shards_come_have_the_same_order(shards: int, data: st.DataObject) -> None:
    running = RunningFold(shards, named)
    for shard in data.draw(st.permutations(range(shards))):
        with pytest.raises((KeyError, ValueError), match="is missing"):
            running.total  # noqa: B018
        running.put(shard, str(shard))
        for wrong in (shard, shards, -1):
            with pytest.raises(ValueError, match=f"got shard {wrong}"):
                running.put(wrong, "again")
    assert running.total == fold_shards(list(map(str, range(shards))), named)
    assert len(running.values()) == 1
