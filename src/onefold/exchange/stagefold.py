"""The fold of gradients that come stage by stage, shard by shard, to the owners of their pieces.

`StageFold` takes what devices give. `StageSums` has the owner's sums. `RunningFold` is the fold of
values that come one by one, in any order: it keeps as few sums as it can.

Note: lent tensors
------------------
Much of what comes need not be kept: it lies in a gradient that backward would like to free, or in
memory that another device will write again, and it is mostly added to something else at once. So a
sum may hold tensors that are *lent*: an addition never writes to them, and what is still lent when
all that came at one time has been added is copied.

Note: how many sums are kept
----------------------------
Two halves of a node of the tree (see `onefold.core.fold`) are added as soon as both are there, and
nothing else is ever added. Of shards that come from left to right, one after the other, at most one
sum is kept for each level of the tree. Where D devices take shards in turn, the D that come at one
time are neighbours: they add up to a few nodes at once, and what is kept for longer is one sum for
each level above those.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from functools import lru_cache, partial
from typing import Generic, TypeVar

import torch

from onefold.core.fold import Block
from onefold.core.roster import Roster
from onefold.exchange.carrier import DONE, Brought, Carrier, Gift, Want
from onefold.system.compat import add_each
from onefold.system.heap import Heap

__all__ = ["StageFold"]


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


_EVENTS_UNDERWAY = 2
"""Of which gradients may be late. Between the gifts of two stages there is a want, so they have the
time in which one stage is computed."""


class StageFold:
    """Takes what this process's devices give, and adds up what is for it of everybody's gifts.

    In a step all devices call `begin`, then for each round of shards `give` for every stage that
    they have computed and `end_round`, and then `totals`.

    Args:
        carrier: brings gifts to the owners.
        own: the devices of this process.
        heap: where sums are kept.
    """

    def __init__(self, carrier: Carrier, own: Sequence[int], heap: Heap) -> None:
        self.stages = carrier.layout.stages
        """Of the model."""
        self._carrier = carrier
        self._own = own
        self._heap = heap
        self._late: deque[list[Brought]] = deque()
        """What may still be on its way, of one event after the other."""
        self._sums = [StageSums(carrier.storage.shards, heap) for _ in range(len(self.stages))]

    def bind(self, roster: Roster) -> None:
        """Adopt a roster: who owns what."""
        self._carrier.bind(roster)
        self._spans = {device: roster.spans[device] for device in self._own}
        own = {number for span in self._spans.values() for number in span}
        self._pieces = [
            [number for number in numbers if number in own]
            for numbers in self._carrier.layout.pieces
        ]
        self._places = {
            number: (stage, place)
            for stage, numbers in enumerate(self._pieces)
            for place, number in enumerate(numbers)
        }

    def begin(self, empty: Iterable[int]) -> None:
        """Begin a step.

        Args:
            empty: the shards without samples, which nobody runs.
        """
        # Of a step that failed something may still be on its way to memory that is in use.
        self._arrived()
        self.await_rooms()
        self.release()
        for shard in empty:
            for sums, numbers in zip(self._sums, self._pieces, strict=True):
                sums.put(shard, StageSum([None] * len(numbers), set()), last=True)

    def give(self, gift: Gift) -> None:
        """Hand over a shard's gradients of one stage; may block until other devices bring theirs.

        The gradients belong to the fold, which may add to them in place.
        """
        self._take(self._carrier.carry(gift))

    def lend(self, values: Callable[[int], torch.Tensor]) -> None:
        """Say how what this process owns of the parameters is found; see `Carrier.lend`."""
        self._carrier.lend(values)

    def want(self, want: Want) -> None:
        """Have the parameters of a stage brought; may block until other devices make a call."""
        self._take(self._carrier.carry(want))

    @property
    def brings_ahead(self) -> bool:
        """See `Carrier.brings_ahead`."""
        return self._carrier.brings_ahead

    def await_rooms(self) -> None:
        """Wait for what was wanted ahead of its use; see `Carrier.await_rooms`."""
        self._carrier.await_rooms()

    def in_line(self) -> AbstractContextManager[None]:
        """Surround the shards of a step that go through lines of devices; see `Carrier.in_line`."""
        return self._carrier.in_line()

    def end_round(self) -> None:
        """Wait until every device has given all of its shard of this round."""
        while not self._take(self._carrier.carry(None)):
            pass
        self._add(self._arrived())
        self.await_rooms()

    def totals(self, device: int) -> list[torch.Tensor | None]:
        """The summed gradient of each piece of an own device's span, shaped as it.

        A piece has None where no shard gave a gradient.
        """
        places = [self._places[number] for number in self._spans[device]]
        # Of a stage of which nothing is this process's, nothing has come, perhaps.
        found = {stage: self._sums[stage].totals for stage in {stage for stage, _ in places}}
        return [found[stage][place] for stage, place in places]

    def release(self) -> None:
        """Drop all sums."""
        for sums in self._sums:
            sums.clear()

    def _take(self, brought: Sequence[Brought]) -> bool:
        """Add up what has come; return whether all are done with their shards.

        What is late is added up some events later, or at the end of the round.
        """
        self._late.append([each for each in brought if each.arrive is not None])
        come = self._arrived(but=_EVENTS_UNDERWAY)
        self._add([*come, *(each for each in brought if each.arrive is None)])
        return all(each.word == DONE for each in brought)

    def _arrived(self, but: int = 0) -> list[Brought]:
        """Wait for what was still on its way, but for the latest events, and take it out."""
        come: list[Brought] = []
        while len(self._late) > but:
            for each in self._late.popleft():
                assert each.arrive is not None
                each.arrive()
                come.append(each)
        return come

    def _add(self, brought: Sequence[Brought]) -> None:
        touched = set()
        for word, pieces, lent, _ in brought:
            if not word.is_gift:
                continue
            tensors = [pieces.get(number) for number in self._pieces[word.stage]]
            if self._heap.apart:
                tensors, lent = [None if t is None else self._heap.copy(t) for t in tensors], False
            given = StageSum(tensors, set(range(len(tensors))) if lent else set())
            self._sums[word.stage].put(word.shard, given, last=word.last)
            touched.add(word.stage)
        for stage in touched:
            self._sums[stage].settle()


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
