"""Memory of one of several processes that share none, so that tensors are sent.

`CollectiveMemory` sends partial sums from every device straight to the owner of each partition,
stage by stage during backward if the model has stages, and the updated partitions straight back to
all devices. `CollectiveStageExchange` sends gradients to their owners through torch.distributed as
well.

Note: what is in flight, and who may touch it
---------------------------------------------
``publish`` starts to send the other owners' partitions of this device's partial sums, and to
receive its own partition of theirs; ``collect`` starts the rest. Until ``finish`` the transport
still reads what it sends. The device may nevertheless add to a chunk of its own partition that has
arrived: it sends only the other owners' partitions, so no message contains what it adds to.
``publish_parameters`` receives into the parameters themselves, which no device reads between
``collect`` and ``publish_parameters``.

Note: all sums to all devices
-----------------------------
With `Storage.mirrors` the partition of each device is the whole model, so a step sends everything
during backward, and a device waits until its own sums are sent before it adds to them. Two devices
send as many bytes as with partitions, and D devices send D / 2 times as many.
"""

from __future__ import annotations

from bisect import bisect_right
from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from itertools import accumulate, chain

import torch

from onefold.core.assignment import Assignment
from onefold.core.flat import Chunk, FlatTensors, Segment, storage_order
from onefold.core.fold import Published, blocks_of
from onefold.core.results import Gradients
from onefold.core.shard import Shares, runs_of
from onefold.core.stages import ROOT
from onefold.core.storage import Storage
from onefold.exchange.collective import CollectiveTransport, Moving, Operation
from onefold.exchange.memory import (
    Arrivals,
    Memory,
    Partial,
    PartitionSums,
    PartitionTensors,
    Start,
    by_stage,
)
from onefold.exchange.reduction import (
    Delivery,
    GradientSend,
    ParameterRequest,
    StageExchange,
    StageMessage,
)

__all__ = ["CollectiveMemory", "CollectiveStageExchange"]

_LEARNING = 3
"""Number of steps at the start after which devices agree on the sending order of stages. One step
may not be enough: if the loss turns out to need another path, it sends no stage early."""


class CollectiveMemory(Memory):
    """Memory of one device, which receives the others' partial sums for its own partition.

    Args:
        storage: the sizes.
        start: this process's values; the lead's replace them.
        transport: connects this device to the others; its allocator allocates this process's model
            if its device is the CPU, or keeps no parameters.
        assignment: which device runs which shards and owns which parameters.
    """

    _own: defaultdict[int, Partial]

    def __init__(
        self, storage: Storage, start: Start, transport: CollectiveTransport, assignment: Assignment
    ) -> None:
        allocator = transport.allocator
        super().__init__(storage, assignment, allocator)
        self.transport, self._rank = transport, transport.rank
        # Partial sums are allocated when shares first need them.
        self._own = defaultdict[int, Partial](
            lambda: Partial.private(storage.gradients, transport.device)
        )
        partition = self.partitions[self._rank]
        self._received = defaultdict[Published, PartitionTensors](
            lambda: PartitionTensors(storage.gradients, partition, transport.device)
        )
        self._early = storage.early
        self._take_turns([ROOT] if self._early is None else range(len(self._early))[::-1])
        self._came: list[int] = []
        """Stages of this step, in the order of their publication."""
        self._learns = 0 if self._early is None else _LEARNING
        self._shares = assignment.shares
        self._written = 0
        self._waiting: set[int] = set()
        self._moving: list[Moving] = []
        # A file takes no host memory, so it may hold all parameters. Otherwise each owner keeps its
        # own partition alone.
        self.is_partitioned = storage.stages is not None and (
            allocator.apart or not allocator.on_disk
        )
        self._make_private(start, {self._rank: transport.device})
        # The broadcast comes last, because it covers all memory, in the same order in every
        # process.
        self.broadcast_from_lead(start.buffers)

    def broadcast_from_lead(self, buffers: FlatTensors) -> None:
        flats = [self.trained[self._rank], self.other[self._rank], buffers]
        flats += [] if self.frozen is None else [self.frozen.flat]
        self.transport.broadcast_from_lead(section for flat in flats for section in flat.sections)
        if self.frozen is not None:
            self.frozen.keep()

    def broadcast_tensor_from_lead(self, values: torch.Tensor) -> None:
        self.transport.broadcast_from_lead([values])

    def _take_turns(self, stages: Sequence[int]) -> None:
        """Set the sending order of the stages of partial sums; the same on all devices."""
        self._turns = {stage: turn for turn, stage in enumerate(stages)}
        """Turn of each stage; a single one if sums are sent as a whole."""
        cuts = [[self._cut_stage(each, stage) for stage in stages] for each in self.partitions]
        self.summed = [list(chain.from_iterable(each)) for each in cuts]
        self._bounds = [[0, *accumulate(map(len, each))] for each in cuts]
        """Index of each turn's first chunk, for each device."""

    def _learn_turns(self) -> None:
        """Adopt the publication order of the first device that has published all stages."""
        if self._learns:
            # Devices may differ, for instance if one runs no shards; all adopt the order of the
            # same device.
            self._learns -= 1
            orders = self.transport.all_gather_values({self._rank: self._came})
            order = next((each for each in orders if len(each) == len(self._turns)), None)
            if order is not None:
                self._take_turns(order)

    def start_step(self, shares: Shares) -> None:
        # A failed step may have left messages or turns behind.
        self._shares, self._written, self._waiting, self._moving = shares, 0, set(), []
        self._came = []

    def publish(self, device: int, slot: int, gradients: Sequence[torch.Tensor | None]) -> None:
        self._own[slot].write(gradients)
        self._send(range(slot * len(self._turns), (slot + 1) * len(self._turns)))

    def hold(self, slot: int, gradients: Gradients) -> Gradients:
        return self._own[slot].hold(gradients)

    def publish_stage(
        self, slot: int, stage: int, gradients: Sequence[torch.Tensor | None]
    ) -> None:
        assert self._early is not None
        self._came.append(stage)
        self._own[slot].write_some(self._early.entries[stage], gradients)
        self._send([slot * len(self._turns) + self._turns[stage]])

    def _send(self, written: Iterable[int]) -> None:
        """Send the parts of partial sums whose turn it is, now that more of them are written."""
        # A part that is written out of turn waits, because messages are matched by their order.
        self._waiting.update(written)
        while self._written in self._waiting:
            self._waiting.remove(self._written)
            self._start_next()

    def _start_next(self) -> None:
        """Start to send the next part of this device's sums, and to receive the others' next part.

        Every process starts the same parts in the same order.
        """
        number, self._written = self._written, self._written + 1
        slot, turn = divmod(number, len(self._turns))
        shares, operations = self._shares, []
        for peer in self.transport.peers():
            # Devices may have different numbers of blocks, which both ends derive from the shares.
            if slot < len(blocks_of(shares.shards_of(self._rank), shares.shards)):
                operations += self._part(True, peer, self._own[slot], peer, turn)
            if slot < len(blocks_of(shares.shards_of(peer), shares.shards)):
                received = self.partial(Published(peer, slot))
                operations += self._part(False, peer, received, self._rank, turn)
        self._moving.append(self.transport.move(operations))

    def _part(
        self, sends: bool, peer: int, sums: PartitionSums, owner: int, turn: int
    ) -> list[Operation]:
        start, stop = self._bounds[owner][turn : turn + 2]
        chunks = self.summed[owner][start:stop]
        return _moves(sends, peer, sums, chunks, first=start)

    def _cut_stage(self, partition: Sequence[Segment], stage: int) -> list[Chunk]:
        own = partition
        if self._early is not None:
            own = [each for each in partition if self._early.stage_of[each.entry] == stage]
        return self._cut(self.storage.gradients, own)

    def collect(self, shares: Shares, *, partials: bool = True) -> Arrivals:
        transport, table = self.transport, self.table
        blocks = (blocks_of(shares.shards_of(n), shares.shards) for n in range(transport.size))
        parts = max(map(len, blocks)) * len(self._turns) if partials else 0
        # Every device starts the same number of parts, also those for blocks that it does not have.
        while self._written < parts:
            self._start_next()
        shards = {peer: shares.shards_of(peer) for peer in transport.peers()}
        own = table.row(self._rank, shares.shards_of(self._rank))
        rows = {peer: table.empty_row(peer, theirs) for peer, theirs in shards.items()}
        swapped = transport.move([op for peer in rows for op in _swap(peer, [own], [rows[peer]])])
        tables = transport.move(self._tables_to_move(shares))

        def finish() -> None:
            # Finish in this order on every device, because messages are matched by their order
            # alone.
            for moving in (*self._moving, swapped, tables):
                moving.finish()
            for peer, row in rows.items():
                table.take_row(peer, shards[peer], row)
            # The table is now complete and the same on every device, so either all devices exchange
            # buffers or none does.
            if table.changed.any():
                transport.move(self._rows_to_move(shares, [table.rows_memory])).finish()
            self._learn_turns()

        def wait_for(number: int) -> None:
            # Chunks are numbered by turn, so the number tells which messages bring it.
            turn = bisect_right(self._bounds[self._rank], number) - 1
            for moving in self._moving[turn :: len(self._turns)]:
                # A mirror adds to sums that it also sends, so wait until these have left.
                moving.finish() if self.storage.mirrors else moving.wait_for(number)

        # The sums may still be on their way: the owner adds each chunk when it arrives.
        return Arrivals(wait_for, finish)

    def partial(self, place: Published) -> PartitionSums:
        return self._own[place.slot] if place.device == self._rank else self._received[place]

    def publish_parameters(self) -> None:
        # If no device keeps all parameters, each partition stays with its owner.
        if self.trained[self._rank].is_there:
            self._all_gather(self.trained[self._rank], self._updated)

    def all_gather_gradient(self, whole: FlatTensors) -> None:
        self._all_gather(whole, self.summed)

    def _all_gather(self, flat: FlatTensors, chunks: Sequence[Sequence[Chunk]]) -> None:
        # Receive straight into this memory: each stretch has one owner, so messages cannot overlap.
        operations = []
        for peer in self.transport.peers():
            operations += _moves(True, peer, flat, chunks[self._rank])
            operations += _moves(False, peer, flat, chunks[peer])
        self.transport.move(operations).finish()

    def _tables_to_move(self, shares: Shares) -> list[Operation]:
        """List what to send and receive of tables on a device: totals, then values."""
        # Tables on the host are part of the row. Tables on a device are sent separately, so that
        # the host does not wait until the device has computed them.
        if self.table.on_host:
            return []
        values = [self.table.values] if self.table.width else []
        return self._rows_to_move(shares, [self.table.numbers, *values])

    def _rows_to_move(self, shares: Shares, tables: Sequence[torch.Tensor]) -> list[Operation]:
        """List what to send (this device's shards) and receive (all others) of some tables."""
        own = runs_of(shares.shards_of(self._rank))
        operations = []
        for peer in self.transport.peers():
            theirs = runs_of(shares.shards_of(peer))
            for table in tables:
                coming = [table[run] for run in theirs]
                operations += _swap(peer, [table[run] for run in own], coming)
        return operations


def _swap(
    peer: int, leaving: Iterable[torch.Tensor], coming: Iterable[torch.Tensor]
) -> list[Operation]:
    sends = [Operation(True, peer, part) for part in leaving]
    return sends + [Operation(False, peer, part) for part in coming]


def _moves(
    sends: bool, peer: int, memory: PartitionSums, chunks: Sequence[Chunk], first: int = 0
) -> list[Operation]:
    numbered = enumerate(chunks, start=first)
    return [Operation(sends, peer, memory.chunk(chunk), number) for number, chunk in numbered]


class CollectiveStageExchange(StageExchange):
    """The stage exchange of one process of a group.

    Within `in_pipeline` it connects only the devices that compute the same stages.

    Args:
        memory: the memory of this device; the allocator of its transport holds what arrives if the
            device is the CPU.
    """

    prefetches = True

    def __init__(self, memory: CollectiveMemory) -> None:
        assignment, self._transport = memory.assignment, memory.transport
        super().__init__(memory.storage, assignment, self._transport.rank)
        self._everybody = range(self._transport.size)
        self._column = assignment.shares.column_of(self.rank)
        """Devices that compute the same stages, including this one."""
        self._among: Sequence[int] = self._everybody
        self._underway: list[Moving] = []
        """Parameters that were requested before their use, here or on another device."""
        # Includes frozen parameters, which stages gather in the same message.
        kept = self.storage.kept(assignment.partitions)
        self._kept = [by_stage(self.partitioned_layout, numbers) for numbers in kept]

    @contextmanager
    def in_pipeline(self) -> Iterator[None]:
        self._among = self._column
        try:
            yield
        finally:
            self._among = self._everybody

    def exchange(self, call: StageMessage) -> list[Delivery]:
        transport = self._transport
        if isinstance(call, ParameterRequest) and self._is_alone_with(call.stage):
            # Send no message: no other device has a part of this stage, or takes part in the
            # request.
            self._fill(call, self._numbered(self._kept[self.rank][call.stage]))
            return []
        headers = self._all_gather_headers(transport, self._among, call)
        others = [header for rank, header in headers.items() if rank != self.rank]
        # Copy a stage once for all devices that request it, if it is not stored on the device.
        requested = {header.stage for header in others if header.is_request}
        kept = self._kept[self.rank]
        own = {
            stage: [(n, each.to(transport.device)) for n, each in self._numbered(kept[stage])]
            for stage in requested
        }
        # In each pair of devices, one end lists its sends in the order of the other's receives.
        at_once: list[Operation] = []
        ahead: list[Operation] = []
        coming: dict[int, dict[int, torch.Tensor]] = {}
        for peer in (peer for peer in transport.peers() if peer in headers):
            coming[peer] = {n: self._new_segment(n) for n in self._given(headers[peer])}
            leaving = self._own_segments(call, peer) if isinstance(call, GradientSend) else {}
            at_once += _swap(peer, map(storage_order, leaving.values()), coming[peer].values())
            asked = ahead if headers[peer].is_ahead else at_once
            if headers[peer].is_request:
                asked += _swap(peer, (each for _, each in own[headers[peer].stage]), [])
            awaited = ahead if headers[self.rank].is_ahead else at_once
            awaited += _swap(peer, [], self._awaited(call, peer))
        # Start both, in this order, before waiting, or devices would wait for each other.
        moving, prefetched = transport.move(at_once), transport.move(ahead)
        self._underway += [prefetched] if ahead else []
        if isinstance(call, ParameterRequest):
            # Own segments need no message; copy them while the others arrive.
            self._fill(call, own.get(call.stage) or self._numbered(kept[call.stage]))
            if not call.ahead:
                moving.finish()
        found = []
        for rank, header in headers.items():
            if rank == self.rank and isinstance(call, GradientSend):
                delivery = self._own_delivery(call)
            else:
                segments = {n: self._shaped(flat, n) for n, flat in coming.get(rank, {}).items()}
                delivery = Delivery(header, segments)
            found.append(delivery._replace(arrive=moving.finish))
        return found

    def await_prefetched(self) -> None:
        while self._underway:
            self._underway.pop(0).finish()

    def _is_alone_with(self, stage: int) -> bool:
        """Whether a request for a stage needs no other device; never within `in_pipeline`."""
        kept, everything = self._kept[self.rank][stage], self.partitioned_layout.segments[stage]
        # All devices request the root stage (parameters in no stage), so its owner takes part too.
        return self._among != self._column and stage != ROOT and len(kept) == len(everything) > 0

    def _awaited(self, call: StageMessage, peer: int) -> list[torch.Tensor]:
        """Buffers for the parameters that this device requests and ``peer`` keeps."""
        if not isinstance(call, ParameterRequest):
            return []
        layout = self.partitioned_layout
        return [layout.in_room(n, call.buffer) for n in self._kept[peer][call.stage]]

    def _new_segment(self, number: int) -> torch.Tensor:
        """Allocate memory for the gradient of a segment: (numel,)."""
        _, nbytes, dtype = self.layout.places[number]
        device = self._transport.device
        if device.type == "cpu":
            return self._transport.allocator.empty(nbytes).view(dtype)
        return torch.empty(nbytes // dtype.itemsize, dtype=dtype, device=device)
