"""Sums that are added up as shards come."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from onefold.core.fold import fold_shards
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


def test_a_shard_comes_once_and_what_has_not_come_is_named() -> None:
    running = RunningFold(3, named)
    running.put(0, "a")
    for shard in (0, 3, -1):
        with pytest.raises(ValueError, match=f"got shard {shard}"):
            running.put(shard, "b")
    running.put(2, "c")
    with pytest.raises(KeyError, match="shard 1 has not come"):
        running.total  # noqa: B018
