"""Sums the gradients of all shards, in the order of the tree, on the owner of each segment.

`BlockReduction` sums whole partial sums, which devices publish. `StageReduction` takes gradients
stage by stage, shard by shard, as devices compute them: a `StageExchange` sends the gradients of
one stage of one shard to the owners, and `RunningFold` sums values that arrive one by one, in any
order, and keeps as few sums as possible.

Note: which memory the sum of blocks ends up in
-----------------------------------------------
The owner of a partition adds in place to the leftmost partial sum, whichever device published it.
This is safe between ``collect`` and ``publish_parameters``: all devices have finished writing, each
owner touches only its own partition, and no other device reads this stretch. The total is then a
view of that partial sum, so neither may be overwritten before ``publish_parameters`` returns on
every device.

Note: shared tensors
--------------------
Most gradients that arrive stage by stage are added to another sum at once, so they are not copied
on arrival, although their memory is about to be freed by backward or overwritten by another device.
So a sum may hold *shared* tensors: an addition never writes to them. Once everything that arrived
together has been added, the tensors that are still shared are copied.

Note: how many sums are kept
----------------------------
Two halves of a node of the tree (see `onefold.core.fold`) are added as soon as both are there, and
nothing else is ever added. If shards arrive from left to right, at most one sum is kept for each
level of the tree. If D devices run shards in turn, the D shards that arrive together are neighbors:
their sums complete a few nodes at once, and only one sum is kept for each level above those.

Note: one event after the other
-------------------------------
Devices compute their shards concurrently. They may finish stages at different times and in
different orders, or not finish all of them. So the protocol has a single call,
`StageExchange.exchange`. A device makes it when it has gradients of a stage, needs the parameters
of a stage that others keep, or is finished with its shard; a header describes what it sends or
requests. The calls of all devices that meet are one *event*. From the headers every device knows
which messages follow. A round of shards is over when all devices report that they are finished.
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
    """Sums gradients over all shards.

    The methods are called in the order of a step: `collect`, `totals`, `release`.
    """

    @abstractmethod
    def collect(self, shares: Shares) -> None:
        """Wait until every device has handed over all of its gradients, and sum them."""

    @abstractmethod
    def totals(self, device: int) -> Sequence[torch.Tensor | None]:
        """Return the summed gradient of each segment in the partition of a device of this process.

        Each has the shape of its segment; None if no shard gave a gradient.
        """

    @abstractmethod
    def release(self) -> None:
        """Drop all sums."""


class BlockReduction(Reduction):
    """Sums whole partial sums, one of each block of shards, over the partitions of this process.

    On a CPU it proceeds chunk by chunk: the sums of the tree's inner nodes are then still in the
    cache when they are added, and a chunk can be added while later ones are on their way.

    Args:
        memory: where partial sums are published.
    """

    def __init__(self, memory: Memory) -> None:
        self.memory = memory
        self._totals: dict[int, list[torch.Tensor | None]] = {}

    def collect(self, shares: Shares) -> None:
        # Collect before any addition: additions are in place, so all devices must have finished
        # writing.
        arrivals = self.memory.collect(shares)
        for device in self.memory.trained:
            self._totals[device] = self._added_up(device, shares, arrivals)
        # Wait for sends only now: this process's partial sums may still be leaving while it sums
        # its partitions, because no other device receives these stretches.
        if arrivals is not None:
            arrivals.finish()

    def totals(self, device: int) -> Sequence[torch.Tensor | None]:
        return self._totals.get(device, ())

    def release(self) -> None:
        # Drop the totals, which are views of a partial sum that will be overwritten.
        self._totals = {}

    def _added_up(
        self, device: int, shares: Shares, arrivals: Arrivals | None
    ) -> list[torch.Tensor | None]:
        """Sum the partial sums over a device's partition; return one tensor per segment."""
        # Memory for the total, if it cannot stay in the leftmost partial sum.
        home = self.memory.home(device)
        # Derived from the shares alone, so that every owner adds the same blocks in the same order.
        published = published_by(shares)
        memories = {block: self.memory.partial(at) for block, at in published.items()}
        # A single partial sum that is already here, and may stay where it is, is the total.
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
            # Add in place, left before right: the leftmost part becomes the total and loses its own
            # value. So each chunk must be folded exactly once per step.
            for pairs in additions(shares, together=self.memory.at_once):
                add_each(
                    [each for left, _ in pairs for each in parts[left]],
                    [each for _, right in pairs for each in parts[right]],
                )
            if home is not None:
                for chunk, total in zip(own, parts[min(parts)], strict=True):
                    # `to` copies nothing on the same device, so the total may be in place already.
                    if total.data_ptr() != home.chunk(chunk).data_ptr():
                        home.chunk(chunk).copy_(total)
        source: PartitionSums = memories[min(memories)] if home is None else home
        return [source.segment(segment) for segment in self.memory.partitions[device]]

    def _added_together(self, chunks: int) -> Iterable[Sequence[int]]:
        """Group the numbers of the chunks that are added by the same kernels."""
        if not self.memory.at_once:
            return [[number] for number in range(chunks)]
        # The last chunk is added separately: it may be on its way while the others are added.
        return filter(len, (range(chunks - 1), range(max(chunks - 1, 0), chunks)))


T = TypeVar("T")


class RunningFold(Generic[T]):
    """Sums one value per shard in the order of the tree, as values arrive in any order.

    >>> running = RunningFold(3, lambda x, y: f"({x}+{y})")
    >>> for shard in (2, 1, 0):
    ...     running.put(shard, "abc"[shard])
    >>> running.total
    '((a+b)+c)'

    Args:
        shards: number of values (V).
        add: adds two sums, the left one first; may work in place and return its first argument.
    """

    def __init__(self, shards: int, add: Callable[[T, T], T]) -> None:
        self._shards = shards
        self._add = add
        self._kept: dict[Block, T] = {}
        self._open: dict[int, T] = {}
        self._came: set[int] = set()

    def values(self) -> list[T]:
        """Return the sums that are kept now."""
        return [*self._kept.values(), *self._open.values()]

    @property
    def total(self) -> T:
        """Sum over all shards.

        Raises:
            KeyError: a shard is missing.
        """
        missing = next((s for s in range(self._shards) if s not in self._came), None)
        if missing is not None:
            raise KeyError(f"shard {missing} is missing")
        return self._kept[Block(0, self._shards)]

    def put(self, shard: int, value: T, *, last: bool = True) -> None:
        """Take a shard's value, and sum all nodes that it completes.

        Args:
            shard: number of the shard.
            value: the value, or a part of it, which is added to the earlier parts.
            last: whether this is the last part of the shard.

        Raises:
            ValueError: the shard has already arrived, or its number is out of range.
        """
        if shard in self._came or not 0 <= shard < self._shards:
            raise ValueError(
                f"each of {self._shards} shards must arrive exactly once, but got shard {shard}"
            )
        if shard in self._open:
            value = self._add(self._open.pop(shard), value)
        if not last:
            self._open[shard] = value
            return
        self._came.add(shard)
        # Climb while the other half of the node above is there; else keep the sum and wait for it.
        node = Block(shard, shard + 1)
        for left, right, above in _climb(shard, self._shards):
            other = right if node == left else left
            if other not in self._kept:
                break
            found = self._kept.pop(other)
            # The order of floating-point addition decides the bits: the left half comes first.
            value = self._add(value, found) if node == left else self._add(found, value)
            node = above
        self._kept[node] = value


@lru_cache(maxsize=4096)
def _climb(shard: int, shards: int) -> tuple[tuple[Block, Block, Block], ...]:
    """List the nodes above a shard, from the lowest up: left half, right half, the node.

    Nodes without a right half are omitted, because they equal their left half.
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
"""Number of events whose gradients may be late. Between the gradients of two stages there is a
request, so gradients may take as long to arrive as one stage takes to compute."""


class StageReduction(Reduction):
    """Takes this process's gradients, and sums all devices' gradients for its segments.

    In a step all devices call `start_step`, then for each round of shards `give` for every stage
    that they have computed and `end_round`, and then `collect` and `totals`.

    Args:
        exchange: sends gradients to the owners.
        memory: memory of this process's devices.
    """

    def __init__(self, exchange: StageExchange, memory: Memory) -> None:
        self.stages = exchange.layout.stages
        """Stages of the model."""
        self.exchange, self._memory = exchange, memory
        """Exchanges gradients and parameters."""
        self._allocator = memory.allocator
        self._late: deque[list[Delivery]] = deque()
        """Deliveries that may still be on their way, one list per event."""
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
        """Start a step.

        Args:
            empty: the shards without samples, which no device runs.
        """
        # Messages of a failed step may still be writing to memory that is in use: finish them.
        self._arrived()
        self.exchange.await_prefetched()
        self.release()
        # Empty shards take their place in the tree without a gradient, to keep the order.
        for shard in empty:
            for sums, numbers in zip(self._sums, self._segments, strict=True):
                sums.put(shard, StageSum([None] * len(numbers), set()))

    def give(self, send: GradientSend) -> None:
        """Hand over a shard's gradients of one stage; may block until other devices send theirs.

        The gradients then belong to the reduction, which may add to them in place.
        """
        self._take_part(send)

    def request(self, request: ParameterRequest) -> None:
        """Gather the parameters of a stage; may block until other devices make a call."""
        self._take_part(request)

    def end_round(self) -> None:
        """Wait until every device has given all gradients of its shard in this round."""
        # A device without work must take part in every event, or the others would wait for it.
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
        # Look up only stages with segments of this process: the others may have no total.
        found = {stage: self._sums[stage].total.tensors for stage in {stage for stage, _ in places}}
        return [found[stage][place] for stage, place in places]

    def release(self) -> None:
        add = partial(StageSum.plus, allocator=self._allocator)
        shards = self.exchange.storage.shards
        self._sums: list[RunningFold[StageSum]] = [
            RunningFold(shards, add) for _ in self.stages.names
        ]

    def _take_part(self, call: StageMessage) -> bool:
        """Take part in an event, and add what arrived; return whether all finished their shards.

        Late gradients are added some events later, or at the end of the round.
        """
        found = self.exchange.exchange(call)
        self._late.append([each for each in found if each.arrive is not None])
        # Waiting for the newest events here would undo the overlap, so leave them underway.
        come = self._arrived(but=_EVENTS_UNDERWAY)
        self._add([*come, *(each for each in found if each.arrive is None)])
        return all(each.header == DONE for each in found)

    def _arrived(self, but: int = 0) -> list[Delivery]:
        """Wait for the late deliveries of all events except the last ``but``; return them."""
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
            # Sums are kept in the allocator's memory, which may be a file, so copy the tensors at
            # once.
            if self._allocator.apart:
                tensors = [None if t is None else self._allocator.copy(t) for t in tensors]
                shared = False
            given = StageSum(tensors, set(range(len(tensors))) if shared else set())
            self._sums[header.stage].put(header.shard, given, last=header.last)
        # Settle a stage only after everything of this event is added: the tensors that are shared
        # then must outlive the event, so they are copied.
        for stage in {each.header.stage for each in sends}:
            for kept in self._sums[stage].values():
                kept.settle(self._allocator)


@dataclass(slots=True)
class StageSum:
    """Gradients of some segments of a stage, of one shard or summed over several."""

    tensors: list[torch.Tensor | None]
    """Gradient of each segment, in its shape; None if no shard gave one."""
    shared: set[int]
    """Places in ``tensors`` of tensors that must neither be written to nor kept."""

    def plus(self, other: StageSum, allocator: TensorAllocator) -> StageSum:
        """Add another sum to the right of this one.

        The result reuses the memory of either sum if possible; otherwise the allocator's.
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
                # The left operand comes first, even if the right one's memory takes the sum.
                target = allocator.like(left) if place in other.shared else right
                tensors[place] = torch.add(left, right, out=target)
                shared.discard(place)
        if in_place:
            add_each(*map(list, zip(*in_place, strict=True)))
        return StageSum(tensors, shared)

    def settle(self, allocator: TensorAllocator) -> None:
        """Copy shared tensors to memory of the allocator."""
        for place in self.shared:
            tensor = self.tensors[place]
            self.tensors[place] = None if tensor is None else allocator.copy(tensor)
        self.shared = set()


_HEAD = struct.Struct("<iiB")
_DONE, _REQUESTS, _PREFETCHES = -1, -2, -3


class Header(NamedTuple):
    """Header of an event: what a device sends or requests in it."""

    shard: int
    """-1 if the device is finished with its shard, -2 if it requests the stage, -3 if it prefetches
    the stage."""
    stage: int
    last: bool
    """Whether this is the last gradient of this stage of this shard."""
    gave: tuple[bool, ...]
    """Whether there is a gradient, for each parameter of the stage."""

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
        """Whether the device continues without these parameters until it needs them."""
        return self.shard == _PREFETCHES

    def packed(self, parameters: int) -> bytes:
        """Pack the header into bytes; the length depends only on ``parameters``, the maximum."""
        # Every device's header has the same length, as `all_gather_bytes` requires.
        flags = sum(1 << place for place, gave in enumerate(self.gave) if gave)
        head = _HEAD.pack(self.shard, self.stage, self.last)
        return head + flags.to_bytes(-(-parameters // 8), "little")

    @classmethod
    def read(cls, packed: bytes, sizes: Sequence[int]) -> Header:
        """Read a header that `packed` wrote; ``sizes`` counts the parameters of each stage."""
        shard, stage, last = _HEAD.unpack_from(packed)
        flags = int.from_bytes(packed[_HEAD.size :], "little")
        count = sizes[stage] if shard >= 0 else 0
        return cls(shard, stage, bool(last), tuple(bool(flags >> n & 1) for n in range(count)))


DONE = Header(_DONE, 0, True, ())
"""Header of a device that is finished with its shard."""


@dataclass(frozen=True, slots=True)
class GradientSend:
    """Gradients of one stage, from a shard or from a microbatch of it."""

    shard: int
    stage: int
    last: bool
    """Whether this is the last gradient of this stage of this shard."""
    gradients: Sequence[torch.Tensor | None]
    """Gradient of each parameter of the stage, in its shape; None if the shard gave none."""

    @property
    def header(self) -> Header:
        """Header that announces the gradients."""
        gave = tuple(gradient is not None for gradient in self.gradients)
        return Header(self.shard, self.stage, self.last, gave)


@dataclass(frozen=True, slots=True)
class ParameterRequest:
    """A request for all parameters of one stage, as the owners of its segments have them."""

    stage: int
    buffer: torch.Tensor
    """(bytes,) uint8 on this device, laid out by `StageLayout.places`. It may end after the trained
    parameters, if this device keeps all frozen ones of the stage."""
    ahead: bool = False
    """Whether the parameters may arrive later, until `StageExchange.await_prefetched`."""

    @property
    def header(self) -> Header:
        """Header that announces the request."""
        return Header(_PREFETCHES if self.ahead else _REQUESTS, self.stage, True, ())


StageMessage = GradientSend | ParameterRequest | None
"""A device's part of an event; None if it is finished with its shard."""


class Delivery(NamedTuple):
    """Gradients that a device sent in an event."""

    header: Header
    segments: Mapping[int, torch.Tensor] = {}
    """Segments for this process, by their numbers, each in its shape. Parameters without a gradient
    are missing."""
    shared: bool = False
    """Whether the segments must be copied or used before the next event, unless they are late."""
    arrive: Callable[[], None] | None = None
    """Waits for the segments, if they are still on their way when the event is over."""


class StageExchange(ABC):
    """Sends gradients to the owners of their segments.

    Args:
        storage: the sizes; its model has stages.
        assignment: which device owns which segments.
        rank: number of this process's first device.
    """

    prefetches = False
    """Whether parameters requested before their use arrive while others are used."""

    def __init__(self, storage: Storage, assignment: Assignment, rank: int = 0) -> None:
        self.storage, self.rank = storage, rank
        self.layout = storage.stage_layout()
        self.partitioned_layout = storage.partitioned_layout()
        """Layout of a stage's parameters in a buffer."""
        entries = self.layout.stages.entries
        self._places = {number: n for numbers in entries for n, number in enumerate(numbers)}
        self._sizes = [len(numbers) for numbers in entries]
        self._values: Callable[[int], torch.Tensor]
        self.owned = [by_stage(self.layout, each) for each in assignment.partitions]
        """Segments whose gradients a device owns, for each device and stage."""

    def serve(self, values: Callable[[int], torch.Tensor]) -> None:
        """Set how this device's own parameters are found.

        Args:
            values: maps the number of a segment (frozen ones come after the trained ones) to
                (numel,) in storage order, in the dtype of the model.
        """
        self._values = values

    def in_pipeline(self) -> AbstractContextManager[None]:
        """Surround the shards of a step that run in pipelines."""
        return nullcontext()

    @abstractmethod
    def exchange(self, call: StageMessage) -> list[Delivery]:
        """Send gradients, request parameters, or report the end; return what all devices sent.

        May block and raise `PeerError` if other processes take part. If every device has all
        parameters, no device requests any.
        """

    def await_prefetched(self) -> None:  # noqa: B027 (most have nothing on its way)
        """Wait until prefetched parameters have arrived, and requested ones have left."""

    def _all_gather_headers(
        self, transport: Transport, among: Sequence[int], call: StageMessage
    ) -> dict[int, Header]:
        """Announce this device's part of an event; return all headers by device."""
        packed = (DONE if call is None else call.header).packed(max(self._sizes, default=0))
        found = transport.all_gather_bytes(packed, among)
        pairs = zip(among, found, strict=True)
        return {rank: Header.read(each, self._sizes) for rank, each in pairs}

    def _given(self, header: Header) -> list[int]:
        """List this process's segments for which a device has a gradient."""
        if not header.is_send:
            return []
        segments = self.storage.segments
        own = self.owned[self.rank][header.stage]
        return [number for number in own if header.gave[self._places[segments[number].entry]]]

    def _own_segments(self, send: GradientSend, owner: int) -> dict[int, torch.Tensor]:
        """View an owner's segments of gradients: in their shape if whole, else (numel,)."""
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
        # Mark views as shared, because keeping them would keep the whole gradients alive.
        shared = len(self.owned[self.rank][send.stage]) < len(self.layout.segments[send.stage])
        return Delivery(send.header, own, shared)

    def _shaped(self, flat: torch.Tensor, number: int) -> torch.Tensor:
        """View (numel,) elements of a segment, in storage order, in its shape."""
        segment = self.storage.segments[number]
        return shape_segment(flat, segment, self.storage.gradients.entries[segment.entry])

    def _fill(self, request: ParameterRequest, kept: Iterable[tuple[int, torch.Tensor]]) -> None:
        """Copy segments of a stage, by number, to the buffer of a request."""
        for number, values in kept:
            place = self.partitioned_layout.in_room(number, request.buffer)
            # A buffer that ends early has no room for frozen segments, which this device keeps.
            if place.numel():
                place.copy_(values)

    def _numbered(self, numbers: Iterable[int]) -> Iterator[tuple[int, torch.Tensor]]:
        """Yield the values of segments one by one, because each may be a converted copy."""
        return ((number, self._values(number)) for number in numbers)


class LocalStageExchange(StageExchange):
    """The stage exchange of one process that drives all devices: nothing is sent.

    Args:
        storage: the sizes.
        assignment: which device owns which segments.
        copies: whether to copy gradients, because sums are kept in other memory.
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
        # No other process uses these gradients, so sums may overwrite them.
        at_home = {
            number: segment.to(device, non_blocking=True)
            for owner, device in enumerate(self._devices)
            for number, segment in self._own_segments(call, owner).items()
        }
        return [Delivery(call.header, at_home, self._copies)]
