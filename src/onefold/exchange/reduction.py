"""Adds up the gradients of all shards, in the tree's order, where the owner of each segment is.

`BlockReduction` adds whole partial sums, which devices publish. `StageReduction` takes gradients
stage by stage, shard by shard, as devices compute them: a `StageExchange` brings those of one stage
of one shard from the device that computed them to the owners, and `RunningFold` adds values that
come one by one, in any order, and keeps as few sums as it can.

Note: whose memory the sum of blocks ends up in
-----------------------------------------------
The owner of a partition adds in place to the leftmost partial sum, whoever published it. This is
safe between ``collect`` and ``publish_parameters``: everybody has finished writing, each owner
touches its own partition alone, and nobody else reads this stretch. The total is then a view of
that partial sum, so neither may be written again before ``publish_parameters`` has returned on
every device.

Note: shared tensors
--------------------
Much of what comes stage by stage need not be kept: it lies in a gradient that backward would like
to free, or in memory that another device will write again, and it is mostly added to something else
at once. So a sum may hold tensors that are *shared*: an addition never writes to them, and what is
still shared when all that came at one time has been added is copied.

Note: how many sums are kept
----------------------------
Two halves of a node of the tree (see `onefold.core.fold`) are added as soon as both are there, and
nothing else is ever added. Of shards that come from left to right, one after the other, at most one
sum is kept for each level of the tree. Where D devices take shards in turn, the D that come at one
time are neighbors: they add up to a few nodes at once, and what is kept for longer is one sum for
each level above those.

Note: one event after the other
-------------------------------
Devices compute their shards at the same time, and each finishes its stages when it does, perhaps in
another order than the others, or not all of them. So nothing is taken for granted but this: whoever
has gradients of a stage, whoever needs the parameters of one that others keep, and whoever is done
with its shard, makes the same call, `StageExchange.exchange`, and describes in a header what it
sends or requests. All calls that meet are one *event*. Then everybody knows what is on its way from
whom to whom, and a round of shards is over when all report that they are done.
"""

from __future__ import annotations

import struct
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from functools import lru_cache, partial
from typing import Generic, NamedTuple, TypeVar

import torch

from onefold.core.assignment import Assignment
from onefold.core.fold import Block, additions, published_by
from onefold.core.shard import Shares
from onefold.core.storage import Storage
from onefold.exchange.memory import (
    Arrivals,
    Memory,
    PartitionSums,
    by_stage,
    cut_segment,
    shape_segment,
)
from onefold.exchange.transport import Transport
from onefold.system.allocator import TensorAllocator
from onefold.system.compat import add_each

__all__ = [
    "DONE",
    "BlockReduction",
    "Delivery",
    "GradientSend",
    "LocalStageExchange",
    "ParameterRequest",
    "Reduction",
    "RunningFold",
    "StageExchange",
    "StageReduction",
]


class Reduction(ABC):
    """Adds up gradients over all shards.

    The methods are called in the order of a step: `collect`, `totals`, `release`.
    """

    @abstractmethod
    def collect(self, shares: Shares) -> None:
        """Wait until every device has handed over all of its gradients, and add them up."""

    @abstractmethod
    def totals(self, device: int) -> Sequence[torch.Tensor | None]:
        """The summed gradient of each segment of an own device's partition, shaped as it.

        A segment has None where no shard gave a gradient.
        """

    @abstractmethod
    def release(self) -> None:
        """Drop all sums."""


class BlockReduction(Reduction):
    """Adds whole partial sums, one of each block of shards, over the partitions of this process.

    On processors it goes chunk by chunk: the sums of the tree's inner nodes are then still in the
    cache when they are added in turn, and a chunk can be added while later ones are on their way.

    Args:
        memory: where partial sums are published.
    """

    def __init__(self, memory: Memory) -> None:
        self.memory = memory
        self._totals: dict[int, list[torch.Tensor | None]] = {}

    def collect(self, shares: Shares) -> None:
        # Before any addition: it is in place, so everybody must have finished writing.
        arrivals = self.memory.collect(shares)
        for device in self.memory.trained:
            self._totals[device] = self._added_up(device, shares, arrivals)
        # Only now: our partial sums may still be on their way out while our partitions are added
        # up, as no other device is sent these stretches.
        if arrivals is not None:
            arrivals.finish()

    def totals(self, device: int) -> Sequence[torch.Tensor | None]:
        return self._totals.get(device, ())

    def release(self) -> None:
        # The totals are views of somebody's partial sum.
        self._totals = {}

    def _added_up(
        self, device: int, shares: Shares, arrivals: Arrivals | None
    ) -> list[torch.Tensor | None]:
        """Add up the partial sums over a device's partition; return one tensor per segment."""
        # Where the total goes, if it cannot stay where the leftmost partial sum lies.
        home = self.memory.home(device)
        # From the shares alone, so every owner adds the same blocks in the same order.
        published = published_by(shares)
        memories = {block: self.memory.partial(at) for block, at in published.items()}
        # A lone partial sum that is here, and may stay where it lies, is the total already.
        nothing_to_do = len(published) == 1 and arrivals is None and home is None
        chunks = () if nothing_to_do else self.memory.summed[device]
        for numbers in self._added_together(len(chunks)):
            if arrivals is not None:
                for number in numbers:
                    arrivals.wait_for(number)
            own = [chunks[number] for number in numbers]
            parts = {
                block: [each.chunk(chunk) for chunk in own] for block, each in memories.items()
            }
            if home is not None:
                parts = {b: [each.to(home.device) for each in part] for b, part in parts.items()}
            # In place, left before right: the leftmost part ends up as the total, and its own value
            # is gone. Each chunk is therefore folded exactly once a step.
            for pairs in additions(shares, together=self.memory.at_once):
                add_each(
                    [each for left, _ in pairs for each in parts[left]],
                    [each for _, right in pairs for each in parts[right]],
                )
            if home is not None:
                for chunk, total in zip(own, parts[min(parts)], strict=True):
                    # `to` copies nothing on the same device: the total may be in place already.
                    if total.data_ptr() != home.chunk(chunk).data_ptr():
                        home.chunk(chunk).copy_(total)
        source: PartitionSums = memories[min(memories)] if home is None else home
        return [source.segment(segment) for segment in self.memory.partitions[device]]

    def _added_together(self, chunks: int) -> Iterable[Sequence[int]]:
        """The numbers of chunks that are added by the same kernels."""
        if not self.memory.at_once:
            return [[number] for number in range(chunks)]
        # The last one may be on its way for as long as it takes to add all others.
        return filter(len, (range(chunks - 1), range(max(chunks - 1, 0), chunks)))


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
        self._open: dict[int, T] = {}
        self._came: set[int] = set()

    def values(self) -> list[T]:
        """The sums that are kept now."""
        return [*self._kept.values(), *self._open.values()]

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

    def put(self, shard: int, value: T, *, last: bool = True) -> None:
        """Take a shard's value, and add up all nodes that are complete with it.

        Args:
            shard: its number.
            value: its value, or a part of it, which is added to the parts before it.
            last: whether nothing more comes of the shard.

        Raises:
            ValueError: the shard has come already, or there is none of this number.
        """
        if shard in self._came or not 0 <= shard < self._shards:
            raise ValueError(f"expected each of {self._shards} shards once, got shard {shard}")
        if shard in self._open:
            value = self._add(self._open.pop(shard), value)
        if not last:
            self._open[shard] = value
            return
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
"""Of which gradients may be late. Between those of two stages there is a request, so they have the
time in which one stage is computed."""


class StageReduction(Reduction):
    """Takes what this process's devices give, and adds up what is for it of everybody's gradients.

    In a step all devices call `start_step`, then for each round of shards `give` for every stage
    that they have computed and `end_round`, and then `collect` and `totals`.

    Args:
        exchange: brings gradients to the owners.
        memory: of this process's devices.
    """

    def __init__(self, exchange: StageExchange, memory: Memory) -> None:
        self.stages = exchange.layout.stages
        """Of the model."""
        self.exchange, self._memory = exchange, memory
        """Brings gradients and parameters."""
        self._allocator = memory.allocator
        self._late: deque[list[Delivery]] = deque()
        """What may still be on its way, of one event after the other."""
        self._partitions = memory.assignment.partitions
        own = [number for device in memory.trained for number in self._partitions[device]]
        self._segments = by_stage(exchange.layout, own)
        self._places = {
            number: (stage, place)
            for stage, numbers in enumerate(self._segments)
            for place, number in enumerate(numbers)
        }
        self.release()

    def start_step(self, empty: Iterable[int]) -> None:
        """Begin a step.

        Args:
            empty: the shards without samples, which nobody runs.
        """
        # Of a step that failed something may still be on its way to memory that is in use.
        self._arrived()
        self.exchange.await_prefetched()
        self.release()
        for shard in empty:
            for sums, numbers in zip(self._sums, self._segments, strict=True):
                sums.put(shard, StageSum([None] * len(numbers), set()))

    def give(self, send: GradientSend) -> None:
        """Hand over a shard's gradients of one stage; may block until other devices send theirs.

        The gradients belong to the reduction, which may add to them in place.
        """
        self._take_part(send)

    def request(self, request: ParameterRequest) -> None:
        """Gather the parameters of a stage; may block until other devices make a call."""
        self._take_part(request)

    def end_round(self) -> None:
        """Wait until every device has given all of its shard of this round."""
        while not self._take_part(None):
            pass
        self._add(self._arrived())
        self.exchange.await_prefetched()

    def collect(self, shares: Shares) -> None:
        arrivals = self._memory.collect(shares, partials=False)
        if arrivals is not None:
            arrivals.finish()

    def totals(self, device: int) -> list[torch.Tensor | None]:
        places = [self._places[number] for number in self._partitions[device]]
        # Of a stage of which nothing is this process's, nothing has come, perhaps.
        found = {stage: self._sums[stage].total.tensors for stage in {stage for stage, _ in places}}
        return [found[stage][place] for stage, place in places]

    def release(self) -> None:
        add = partial(StageSum.plus, allocator=self._allocator)
        shards = self.exchange.storage.shards
        self._sums: list[RunningFold[StageSum]] = [
            RunningFold(shards, add) for _ in self.stages.names
        ]

    def _take_part(self, call: StageMessage) -> bool:
        """Take part in an event, and add up what has come; whether all are done with their shards.

        What is late is added up some events later, or at the end of the round.
        """
        found = self.exchange.exchange(call)
        self._late.append([each for each in found if each.arrive is not None])
        come = self._arrived(but=_EVENTS_UNDERWAY)
        self._add([*come, *(each for each in found if each.arrive is None)])
        return all(each.header == DONE for each in found)

    def _arrived(self, but: int = 0) -> list[Delivery]:
        """Wait for what was still on its way, but for the latest events, and take it out."""
        come: list[Delivery] = []
        while len(self._late) > but:
            for each in self._late.popleft():
                assert each.arrive is not None
                each.arrive()
                come.append(each)
        return come

    def _add(self, found: Sequence[Delivery]) -> None:
        sends = [each for each in found if each.header.is_send]
        for header, segments, shared, _ in sends:
            tensors = [segments.get(number) for number in self._segments[header.stage]]
            if self._allocator.apart:
                tensors = [None if t is None else self._allocator.copy(t) for t in tensors]
                shared = False
            given = StageSum(tensors, set(range(len(tensors))) if shared else set())
            self._sums[header.stage].put(header.shard, given, last=header.last)
        for stage in {each.header.stage for each in sends}:
            for kept in self._sums[stage].values():
                kept.settle(self._allocator)


@dataclass(slots=True)
class StageSum:
    """Gradients of some segments of a stage, of one shard or added up over several."""

    tensors: list[torch.Tensor | None]
    """One for each segment, shaped as it; None where no shard gave a gradient."""
    shared: set[int]
    """The places in ``tensors`` of those that may not be written to, nor kept."""

    def plus(self, other: StageSum, allocator: TensorAllocator) -> StageSum:
        """Add up two sums, this one left of the other.

        The memory of either may take the result, or else the allocator's.
        """
        tensors, shared = list(self.tensors), set(self.shared)
        in_place: list[tuple[torch.Tensor, torch.Tensor]] = []
        for place, (left, right) in enumerate(zip(self.tensors, other.tensors, strict=True)):
            if right is None:
                continue
            if left is None:
                tensors[place] = right
                shared = shared - {place} | other.shared & {place}
            elif place not in self.shared:
                in_place.append((left, right))
            else:
                # The left one first, even where the right one's memory takes the sum.
                target = allocator.like(left) if place in other.shared else right
                tensors[place] = torch.add(left, right, out=target)
                shared.discard(place)
        if in_place:
            add_each(*map(list, zip(*in_place, strict=True)))
        return StageSum(tensors, shared)

    def settle(self, allocator: TensorAllocator) -> None:
        """Copy what is shared to the allocator."""
        for place in self.shared:
            tensor = self.tensors[place]
            self.tensors[place] = None if tensor is None else allocator.copy(tensor)
        self.shared = set()


_HEAD = struct.Struct("<iiB")
_DONE, _REQUESTS, _PREFETCHES = -1, -2, -3


class Header(NamedTuple):
    """What a device announces in an event."""

    shard: int
    """-1 if the device is done with its shard; -2 if it requests the stage, and -3 if it prefetches
    it."""
    stage: int
    last: bool
    """Whether nothing more comes of this stage of this shard."""
    gave: tuple[bool, ...]
    """For each parameter of the stage, whether there is a gradient."""

    @property
    def is_send(self) -> bool:
        """Whether the device sends gradients."""
        return self.shard >= 0

    @property
    def is_request(self) -> bool:
        """Whether the device requests the parameters of the stage."""
        return self.shard in (_REQUESTS, _PREFETCHES)

    @property
    def is_ahead(self) -> bool:
        """Whether the device goes on without these parameters until it needs them."""
        return self.shard == _PREFETCHES

    def packed(self, parameters: int) -> bytes:
        """Pack the header into bytes, of one length for up to so many parameters."""
        flags = sum(1 << place for place, gave in enumerate(self.gave) if gave)
        head = _HEAD.pack(self.shard, self.stage, self.last)
        return head + flags.to_bytes(-(-parameters // 8), "little")

    @classmethod
    def read(cls, packed: bytes, sizes: Sequence[int]) -> Header:
        """Read what `packed` wrote, where stages have so many parameters."""
        shard, stage, last = _HEAD.unpack_from(packed)
        flags = int.from_bytes(packed[_HEAD.size :], "little")
        count = sizes[stage] if shard >= 0 else 0
        return cls(shard, stage, bool(last), tuple(bool(flags >> n & 1) for n in range(count)))


DONE = Header(_DONE, 0, True, ())
"""The header of a device that is done with its shard."""


@dataclass(frozen=True, slots=True)
class GradientSend:
    """Gradients of one stage, from a shard or from a microbatch of it."""

    shard: int
    stage: int
    last: bool
    """Whether nothing more comes of this stage of this shard."""
    gradients: Sequence[torch.Tensor | None]
    """One for each parameter of the stage, shaped like it; None where the shard gave none."""

    @property
    def header(self) -> Header:
        """What announces it."""
        gave = tuple(gradient is not None for gradient in self.gradients)
        return Header(self.shard, self.stage, self.last, gave)


@dataclass(frozen=True, slots=True)
class ParameterRequest:
    """A request for all parameters of one stage, as the owners of its segments have them."""

    stage: int
    buffer: torch.Tensor
    """(bytes,) uint8 on this device, where they are to lie: as `StageLayout.place` returns. It may
    end where the trained ones do, if this device keeps all frozen ones of the stage."""
    ahead: bool = False
    """Whether they may still be on their way until `StageExchange.await_prefetched`."""

    @property
    def header(self) -> Header:
        """What announces it."""
        return Header(_PREFETCHES if self.ahead else _REQUESTS, self.stage, True, ())


StageMessage = GradientSend | ParameterRequest | None
"""What a device contributes to an event; None if it is done with its shard."""


class Delivery(NamedTuple):
    """What a device has sent in an event."""

    header: Header
    segments: Mapping[int, torch.Tensor] = {}
    """Those that are for this process, by their numbers, each shaped as the segment; those of
    parameters without a gradient are missing."""
    shared: bool = False
    """Whether they must be copied, or used up, before the next event, if they are not late."""
    arrive: Callable[[], None] | None = None
    """Waits for the segments, if they are late: still on their way when the event is over."""


class StageExchange(ABC):
    """Brings gradients to the owners of their segments.

    Args:
        storage: the sizes; its model has stages.
        assignment: who owns what.
        rank: number of this process's first device.
    """

    prefetches = False
    """Whether parameters that are requested ahead of their use come while others are used."""

    def __init__(self, storage: Storage, assignment: Assignment, rank: int = 0) -> None:
        self.storage, self.rank = storage, rank
        self.layout = storage.stage_layout()
        self.partitioned_layout = storage.partitioned_layout()
        """Where parameters of a stage lie in a buffer for it."""
        entries = self.layout.stages.entries
        self._places = {number: n for numbers in entries for n, number in enumerate(numbers)}
        self._sizes = [len(numbers) for numbers in entries]
        self._values: Callable[[int], torch.Tensor]
        self.owned = [by_stage(self.layout, each) for each in assignment.partitions]
        """For each device and stage, the segments whose gradients are for it."""

    def serve(self, values: Callable[[int], torch.Tensor]) -> None:
        """Set how the parameters that this device owns are found.

        Args:
            values: given the number of a segment, frozen ones counted on from the trained ones,
                returns (numel,) in storage order, in the dtype in which models compute.
        """
        self._values = values

    def in_pipeline(self) -> AbstractContextManager[None]:
        """Surround the shards of a step that go through pipelines."""
        return nullcontext()

    @abstractmethod
    def exchange(self, call: StageMessage) -> list[Delivery]:
        """Send gradients, request parameters, or report the end; return what all have sent.

        May block, and raise `PeerError`, where other processes take part. Nobody requests
        parameters where every device has all of them.
        """

    def await_prefetched(self) -> None:  # noqa: B027 (most have nothing on its way)
        """Wait until what was prefetched is here, and what others requested has left."""

    def _all_gather_headers(
        self, transport: Transport, among: Sequence[int], call: StageMessage
    ) -> dict[int, Header]:
        """Announce what this device contributes; what all do, by their numbers."""
        packed = (DONE if call is None else call.header).packed(max(self._sizes, default=0))
        found = transport.all_gather_bytes(packed, among)
        pairs = zip(among, found, strict=True)
        return {rank: Header.read(each, self._sizes) for rank, each in pairs}

    def _given(self, header: Header) -> list[int]:
        """The segments of this process for which a device has a gradient."""
        if not header.is_send:
            return []
        segments = self.storage.segments
        own = self.owned[self.rank][header.stage]
        return [number for number in own if header.gave[self._places[segments[number].entry]]]

    def _own_segments(self, send: GradientSend, owner: int) -> dict[int, torch.Tensor]:
        """Views of what a device owns of gradients: entries in their shape, else (numel,)."""
        found = {}
        for number in self.owned[owner][send.stage]:
            segment = self.storage.segments[number]
            gradient = send.gradients[self._places[segment.entry]]
            if gradient is not None:
                entry = self.storage.gradients.entries[segment.entry]
                found[number] = cut_segment(gradient, segment, entry)
        return found

    def _own_delivery(self, send: GradientSend) -> Delivery:
        own = self._own_segments(send, self.rank)
        # Shared: kept, these views would keep all of the gradients that they are a part of.
        shared = len(self.owned[self.rank][send.stage]) < len(self.layout.segments[send.stage])
        return Delivery(send.header, own, shared)

    def _shaped(self, flat: torch.Tensor, number: int) -> torch.Tensor:
        """A view of (numel,) elements in storage order that is shaped as the segment."""
        segment = self.storage.segments[number]
        return shape_segment(flat, segment, self.storage.gradients.entries[segment.entry])

    def _fill(self, request: ParameterRequest, kept: Iterable[tuple[int, torch.Tensor]]) -> None:
        """Copy segments of a stage, by number, to where they are requested."""
        for number, values in kept:
            place = self.partitioned_layout.in_room(number, request.buffer)
            # What has no place there is at hand, where it is kept.
            if place.numel():
                place.copy_(values)

    def _numbered(self, numbers: Iterable[int]) -> Iterator[tuple[int, torch.Tensor]]:
        """Yield segments that this process keeps, one by one: each may be converted for this."""
        return ((number, self._values(number)) for number in numbers)


class LocalStageExchange(StageExchange):
    """Where one process drives all devices, gradients and parameters are there at once.

    Args:
        storage: the sizes.
        assignment: who owns what.
        copies: whether gradients are to be copied, as sums are kept elsewhere than they lie.
    """

    def __init__(self, storage: Storage, assignment: Assignment, *, copies: bool = False) -> None:
        super().__init__(storage, assignment)
        self._devices, self._copies = assignment.devices, copies

    def exchange(self, call: StageMessage) -> list[Delivery]:
        if call is None:
            return [Delivery(DONE)]
        if isinstance(call, ParameterRequest):
            self._fill(call, self._numbered(self.partitioned_layout.segments[call.stage]))
            return [Delivery(call.header)]
        # The gradients are nobody else's, so they may take sums.
        at_home = {
            number: segment.to(device, non_blocking=True)
            for owner, device in enumerate(self._devices)
            for number, segment in self._own_segments(call, owner).items()
        }
        return [Delivery(call.header, at_home, self._copies)]
