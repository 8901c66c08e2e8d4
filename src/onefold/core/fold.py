"""The fold: one fixed order in which the shards' numbers are added. Pure: it looks inside none.

Note: the order of addition
---------------------------
Floating-point addition is not associative, so the order is part of the result. Ours is a binary
tree over shard numbers 0 to V-1: a node covers an aligned power-of-two range of shards, clipped to
V, and is the sum of its left and its right half. A node whose right half lies wholly beyond V is
its left half. The tree depends on V alone. A *block* is the range of one node; any contiguous range
of shards is a row of whole blocks, so a device can add inside its own blocks and hand over one
partial sum a block, and whoever adds the rest goes on in the very same tree.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import lru_cache
from typing import NamedTuple, TypeVar

from onefold.core.shard import Plan

__all__ = ["Block", "Published", "blocks_of", "fold", "fold_shards", "max_blocks", "published_by"]

T = TypeVar("T")


class Block(NamedTuple):
    """The shards ``start`` to ``stop - 1`` of one node of the tree."""

    start: int
    stop: int


class Published(NamedTuple):
    """Where a block's partial sum lies: the ``slot``-th one of ``device``."""

    device: int
    slot: int


def _halves(node: Block, width: int) -> tuple[Block, Block | None]:
    """The two children of ``node``, which is ``width`` shards wide before clipping."""
    middle = node.start + width // 2
    left = Block(node.start, min(middle, node.stop))
    return left, Block(middle, node.stop) if middle < node.stop else None


def _width(shards: int) -> int:
    return 1 << (shards - 1).bit_length()


@lru_cache(maxsize=4096)
def blocks_of(shards_run: range, shards: int) -> tuple[Block, ...]:
    """The whole blocks, left to right, that make up a contiguous range of shards.

    >>> blocks_of(range(1, 7), 7)
    (Block(start=1, stop=2), Block(start=2, stop=4), Block(start=4, stop=7))
    """

    def visit(node: Block, width: int) -> list[Block]:
        if node.stop <= shards_run.start or shards_run.stop <= node.start:
            return []
        if shards_run.start <= node.start and node.stop <= shards_run.stop:
            return [node]
        left, right = _halves(node, width)
        return visit(left, width // 2) + (visit(right, width // 2) if right else [])

    return tuple(visit(Block(0, shards), _width(shards)))


def max_blocks(shards: int) -> int:
    """The most blocks that any contiguous range of ``shards`` shards splits into."""
    return max(1, 2 * ((shards - 1).bit_length() - 1))


@lru_cache(maxsize=16)
def published_by(plan: Plan) -> Mapping[Block, Published]:
    """Which device holds which block's partial sum, and in which slot."""
    return {
        block: Published(device, slot)
        for device in range(plan.devices)
        for slot, block in enumerate(blocks_of(plan.shards_of(device), plan.shards))
    }


def fold(part: Callable[[Block], T | None], node: Block, add: Callable[[T, T], T]) -> T:
    """The sum over ``node``, added in the tree's order, left before right.

    Args:
        part: the sum over a node where it is at hand, else None; then it is asked for its halves.
            It may do work: a left half is asked for, and kept, before its right half is.
        node: what to add up; ``Block(0, V)`` for everything.
        add: may work in place and return its first argument.

    Raises:
        KeyError: some shard is covered by no part.
    """
    size = node.stop - node.start
    found = part(node)
    if found is not None:
        return found
    if size == 1:
        raise KeyError(f"no part covers shard {node.start}")
    left, right = _halves(node, _width(size))
    first = fold(part, left, add)
    return add(first, fold(part, right, add)) if right else first


def fold_shards(values: Sequence[T], add: Callable[[T, T], T]) -> T:
    """Add up one value a shard in the tree's order.

    >>> fold_shards(["a", "b", "c"], lambda x, y: f"({x}+{y})")
    '((a+b)+c)'
    """
    leaves = {Block(shard, shard + 1): value for shard, value in enumerate(values)}
    return fold(leaves.get, Block(0, len(values)), add)
