"""The fold: a fixed order of adding the values of the shards. Pure.

Note: the order of addition
---------------------------
Floating-point addition is not associative, so the order is part of the result. The fold is a binary
tree over shard numbers 0 to V-1. A node covers an aligned power-of-two range of shards, clipped to
V, and is the sum of its left and its right half. A node whose right half is entirely beyond V
equals its left half; nothing is added to it, not even a zero, which would turn -0.0 into 0.0. The
tree depends on V alone. A *block* is the range of one node. Any set of shards is a sequence of
whole blocks, so a device can sum inside its own blocks and publish one partial sum per block, and
the device that adds the rest continues in the very same tree. Contiguous shards have few blocks.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import lru_cache
from typing import NamedTuple, TypeVar

import torch

from onefold.core.shard import Shares

__all__ = [
    "Block",
    "Published",
    "additions",
    "before_last",
    "blocks_of",
    "fold",
    "fold_rows",
    "fold_shards",
    "max_blocks",
    "published_by",
]

T = TypeVar("T")


class Block(NamedTuple):
    """One node of the tree: the shards ``start`` to ``stop - 1``."""

    start: int
    stop: int


class Published(NamedTuple):
    """Location of a block's partial sum: slot number ``slot`` of ``device``."""

    device: int
    slot: int


@lru_cache(maxsize=4096)
def _halves(node: Block, width: int) -> tuple[Block, Block | None]:
    """Return the two children of ``node``, which is ``width`` shards wide before clipping."""
    middle = node.start + width // 2
    left = Block(node.start, min(middle, node.stop))
    return left, Block(middle, node.stop) if middle < node.stop else None


def _width(shards: int) -> int:
    return 1 << (shards - 1).bit_length()


@lru_cache(maxsize=4096)
def blocks_of(shards_run: Sequence[int], shards: int) -> tuple[Block, ...]:
    """Split shards, in ascending order, into the fewest whole blocks, from left to right.

    >>> blocks_of(range(1, 7), 7)
    (Block(start=1, stop=2), Block(start=2, stop=4), Block(start=4, stop=7))
    """
    run = frozenset(shards_run)

    def visit(node: Block, width: int) -> list[Block]:
        covered = sum(shard in run for shard in range(*node))
        if not covered:
            return []
        # Stop at the largest node that they cover: its children would only add partial sums.
        if covered == node.stop - node.start:
            return [node]
        left, right = _halves(node, width)
        return visit(left, width // 2) + (visit(right, width // 2) if right else [])

    return tuple(visit(Block(0, shards), _width(shards)))


def max_blocks(shards: int) -> int:
    """Return the maximum number of blocks into which a contiguous range of shards splits."""
    # Two at each level below the root's children: one at the left end of the range, one at the
    # right. Memory is allocated for this many, so that new shares never need more.
    return max(1, 2 * ((shards - 1).bit_length() - 1))


@lru_cache(maxsize=16)
def published_by(shares: Shares) -> Mapping[Block, Published]:
    """Return, for each block, the device and slot that hold its partial sum."""
    # A pure function of the shares, so devices do not have to announce what they publish.
    return {
        block: Published(device, slot)
        for device in range(shares.devices)
        for slot, block in enumerate(blocks_of(shares.shards_of(device), shares.shards))
    }


def fold(part: Callable[[Block], T | None], node: Block, add: Callable[[T, T], T]) -> T:
    """Return the sum over ``node``, added in the tree's order, left before right.

    Args:
        part: returns the sum over a node if it is available, else None; then it is called for the
            node's halves. It may do work: a left half is requested, and kept, before its right
            half.
        node: the shards to add up; ``Block(0, V)`` for all.
        add: adds two sums; it may work in place and return its first argument.

    Raises:
        KeyError: no part covers some shard.
    """
    size = node.stop - node.start
    found = part(node)
    if found is not None:
        return found
    if size == 1:
        raise KeyError(f"no part covers shard {node.start}")
    # The last node of a level may be clipped. Rounding its own size up skips the levels at which
    # its right half is empty, where nothing is added anyway.
    left, right = _halves(node, _width(size))
    # Left before right, and left as the first argument, so that an in-place `add` always writes to
    # the memory of the leftmost part.
    first = fold(part, left, add)
    return add(first, fold(part, right, add)) if right else first


def before_last(node: Block) -> list[Block]:
    """Return the nodes that the last shard's sum is added to, the leftmost first.

    >>> before_last(Block(0, 7))
    [Block(start=0, stop=4), Block(start=4, stop=6)]
    """
    found = []
    while node.stop - node.start > 1:
        left, right = _halves(node, _width(node.stop - node.start))
        assert right is not None  # see `fold`
        found.append(left)
        node = right
    return found


@lru_cache(maxsize=16)
def additions(shares: Shares, *, together: bool) -> tuple[tuple[tuple[Block, Block], ...], ...]:
    """Return the in-place additions that combine all published sums, in rounds.

    Additions in one round do not depend on each other. If not ``together``, each addition is a
    round of its own, so that operands are still in the cache. The left block's memory receives the
    sum.

    Raises:
        KeyError: no published block covers some shard.

    >>> shares = Shares.even(shards=5, devices=5)
    >>> for together in (True, False):
    ...     rounds = additions(shares, together=together)
    ...     [[(left.start, right.start) for left, right in each] for each in rounds]
    [[(0, 1), (2, 3)], [(0, 2)], [(0, 4)]]
    [[(0, 1)], [(2, 3)], [(0, 2)], [(0, 4)]]
    """
    published, rounds = published_by(shares), list[list[tuple[Block, Block]]]()

    def add(left: tuple[Block, int], right: tuple[Block, int]) -> tuple[Block, int]:
        depth = max(left[1], right[1]) if together else len(rounds)
        rounds.extend([] for _ in range(len(rounds), depth + 1))
        rounds[depth].append((left[0], right[0]))
        return left[0], depth + 1

    fold(lambda node: (node, 0) if node in published else None, Block(0, shares.shards), add)
    return tuple(map(tuple, rounds))


def fold_rows(rows: torch.Tensor) -> torch.Tensor:
    """Add up one row per shard, (V, ...), in the tree's order, with one kernel per level.

    >>> fold_rows(torch.tensor([[1.0, 2.0], [3.0, 4.0], [5.0, 6.0]]))
    tensor([ 9., 12.])
    """
    while len(rows) > 1:
        pairs = len(rows) // 2
        sums = rows[: 2 * pairs : 2] + rows[1::2]
        rows = sums if len(rows) == 2 * pairs else torch.cat([sums, rows[-1:]])
    return rows[0]


def fold_shards(values: Sequence[T], add: Callable[[T, T], T]) -> T:
    """Add up one value per shard in the tree's order.

    >>> fold_shards(["a", "b", "c"], lambda x, y: f"({x}+{y})")
    '((a+b)+c)'
    """
    while len(values) > 1:
        pairs = zip(values[::2], values[1::2], strict=False)
        values = [*(add(left, right) for left, right in pairs), *values[len(values) & ~1 :]]
    return values[0]
