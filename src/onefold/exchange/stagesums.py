"""The owner's sums where gradients come stage by stage, shard by shard.

Note: lent tensors
------------------
Much of what comes need not be kept: it lies in a gradient that backward would like to free, or in
memory that another device will write again, and it is mostly added to something else at once. So a
sum may hold tensors that are *lent*: an addition never writes to them, and what is still lent when
all that came at one time has been added is copied.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial

import torch

from onefold.core.runningfold import RunningFold
from onefold.system.compat import add_each
from onefold.system.heap import Heap

__all__ = ["StageSum", "StageSums"]


@dataclass(slots=True)
class StageSum:
    """Gradients of some pieces of a stage, of one shard or added up over several."""

    tensors: list[torch.Tensor | None]
    """One for each piece, shaped as it; None where no shard gave a gradient."""
    lent: set[int]
    """The places in ``tensors`` of those that may not be written to, nor kept."""

    def plus(self, other: StageSum, heap: Heap) -> StageSum:
        """Add up two sums, this one left of the other.

        The memory of either may take the result, or else the heap's.
        """
        tensors, lent = list(self.tensors), set(self.lent)
        targets: list[torch.Tensor] = []
        others: list[torch.Tensor] = []
        for place, (left, right) in enumerate(zip(self.tensors, other.tensors, strict=True)):
            if right is None:
                continue
            if left is None:
                tensors[place] = right
                lent -= {place}
                lent |= other.lent & {place}
            elif place not in self.lent:
                targets.append(left)
                others.append(right)
            elif place not in other.lent:
                # The left one first, though the right one's memory takes the sum.
                tensors[place] = torch.add(left, right, out=right)
                lent.discard(place)
            else:
                tensors[place] = torch.add(left, right, out=heap.like(left))
                lent.discard(place)
        if targets:
            add_each(targets, others)
        return StageSum(tensors, lent)

    def settle(self, heap: Heap) -> None:
        """Copy what is lent to the heap."""
        for place in self.lent:
            tensor = self.tensors[place]
            self.tensors[place] = None if tensor is None else heap.copy(tensor)
        self.lent = set()


class StageSums:
    """The sums over the pieces of one stage that devices of this process own.

    Args:
        shards: how many shards every batch is cut into.
        heap: where sums are kept.
    """

    def __init__(self, shards: int, heap: Heap) -> None:
        self._shards = shards
        self._heap = heap
        self.clear()

    def clear(self) -> None:
        """Begin a step."""
        self._fold = RunningFold(self._shards, partial(StageSum.plus, heap=self._heap))
        self._open: dict[int, StageSum] = {}

    def put(self, shard: int, given: StageSum, *, last: bool) -> None:
        """Take what a shard, or a piece of one, gave.

        Args:
            shard: its number.
            given: the gradients.
            last: whether nothing more comes of the shard.
        """
        found = self._open.pop(shard, None)
        whole = given if found is None else found.plus(given, self._heap)
        if last:
            self._fold.put(shard, whole)
        else:
            whole.settle(self._heap)
            self._open[shard] = whole

    def settle(self) -> None:
        """Copy what is lent of all that is kept."""
        for kept in self._fold.values():
            kept.settle(self._heap)

    @property
    def totals(self) -> Sequence[torch.Tensor | None]:
        """The sum over all shards: one tensor for each piece; None where no shard gave one.

        Raises:
            KeyError: a shard has given nothing yet.
        """
        total: StageSum = self._fold.total
        return total.tensors
