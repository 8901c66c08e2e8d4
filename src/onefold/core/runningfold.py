"""The fold of values that come one by one, in any order: keeps as few sums as it can. Pure.

Note: how many sums are kept
----------------------------
Two halves of a node of the tree (see `onefold.core.fold`) are added as soon as both are there, and
nothing else is ever added. Of shards that come from left to right, one after the other, at most one
sum is kept for each level of the tree. Where D devices take shards in turn, the D that come at one
time are neighbours: they add up to a few nodes at once, and what is kept for longer is one sum for
each level above those.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import lru_cache
from typing import Generic, TypeVar

from onefold.core.fold import Block

__all__ = ["RunningFold"]

T = TypeVar("T")


class RunningFold(Generic[T]):
    """Adds up one value per shard in the tree's order, whenever they come.

    >>> running = RunningFold(3, lambda x, y: f"({x}+{y})")
    >>> for shard in (2, 1, 0):
    ...     running.put(shard, "abc"[shard])
    >>> running.total
    '((a+b)+c)'

    Args:
        shards: how many values there will be (V).
        add: adds two sums, the left one first; it may work in place and return its first argument.
    """

    def __init__(self, shards: int, add: Callable[[T, T], T]) -> None:
        self._shards = shards
        self._add = add
        self._kept: dict[Block, T] = {}
        self._came: set[int] = set()

    @property
    def kept(self) -> int:
        """How many sums are kept now."""
        return len(self._kept)

    def values(self) -> list[T]:
        """The sums that are kept now."""
        return list(self._kept.values())

    @property
    def total(self) -> T:
        """The sum over all shards.

        Raises:
            KeyError: some shard has not come.
        """
        missing = next((s for s in range(self._shards) if s not in self._came), None)
        if missing is not None:
            raise KeyError(f"shard {missing} has not come")
        return self._kept[Block(0, self._shards)]

    def put(self, shard: int, value: T) -> None:
        """Take a shard's value, and add up all nodes that are complete with it.

        Raises:
            ValueError: the shard has come already, or there is none of this number.
        """
        if shard in self._came or not 0 <= shard < self._shards:
            raise ValueError(f"expected each of {self._shards} shards once, got shard {shard}")
        self._came.add(shard)
        node = Block(shard, shard + 1)
        for left, right, above in _climb(shard, self._shards):
            other = right if node == left else left
            if other not in self._kept:
                break
            found = self._kept.pop(other)
            value = self._add(value, found) if node == left else self._add(found, value)
            node = above
        self._kept[node] = value


@lru_cache(maxsize=4096)
def _climb(shard: int, shards: int) -> tuple[tuple[Block, Block, Block], ...]:
    """List the nodes above a shard, from the lowest up: left half, right half, the node.

    Nodes without a right half are left out, as they are their left half.
    """
    steps = []
    width = 1
    while width < shards:
        start = shard // (2 * width) * (2 * width)
        middle, stop = start + width, min(start + 2 * width, shards)
        if middle < stop:
            steps.append((Block(start, middle), Block(middle, stop), Block(start, stop)))
        width *= 2
    return tuple(steps)
