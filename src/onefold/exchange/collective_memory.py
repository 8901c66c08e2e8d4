"""Memory of one process of several that cannot see each other's: tensors are moved.

In `CollectiveMemory` partial sums go from every device straight to the owner of each partition,
stage by stage while backward runs if the model has stages, and the updated partitions straight back
to everybody. `CollectiveStageExchange` brings gradients to their
owners through torch.distributed as well.

Note: what is in flight, and who may touch it
---------------------------------------------
``publish`` starts sending the other owners' partitions of this device's partial sums, and receiving
its own partition of theirs; ``collect`` starts what is left. Until ``finish`` the transport still
reads what it sends. The device may add to a chunk of its partition all the same, once that has
arrived: a partition is sent to its owner alone, so this device's part of its own partition is in no
message. ``publish_parameters``
receives into the parameters themselves; nobody computes with them between ``collect`` and
``publish_parameters``.

Note: all sums to all devices
-----------------------------
With `Storage.mirrors` the partition of each device is everything, so all that a step sends leaves
while backward runs, and nothing after it. What a device adds to may then be on its way out as well:
it waits until the stage has left. Two devices send the same bytes as with partitions, and D of them
D / 2 times as many.
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
"""After so many first collections devices agree on the order in which stages are sent: in a first
step a loss may turn out to need another form, and no stage may come early."""


class CollectiveMemory(Memory):
    """One device's memory, which receives the others' partial sums over the partition that it owns.

    Args:
        storage: the sizes.
        start: this process's values, replaced by the lead's.
        transport: to the other devices; its allocator has this process's model, if its device is
            the processor, or keeps nothing.
        assignment: who takes part.
    """

    _own: defaultdict[int, Partial]

    def __init__(
        self, storage: Storage, start: Start, transport: CollectiveTransport, assignment: Assignment
    ) -> None:
        allocator = transport.allocator
        super().__init__(storage, assignment, allocator)
        self.transport, self._rank = transport, transport.rank
        # Allocated when shares first need them.
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
        """The stages of this step, as they came."""
        self._learns = 0 if self._early is None else _LEARNING
        self._shares = assignment.shares
        self._written = 0
        self._waiting: set[int] = set()
        self._moving: list[Moving] = []
        # A file takes no memory where there is none to spare; all else is with its owners.
        self.is_partitioned = storage.stages is not None and (
            allocator.apart or not allocator.on_disk
        )
        self._make_private(start, {self._rank: transport.device})
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
        """Have the stages of partial sums be sent in this order; alike on all devices."""
        self._turns = {stage: turn for turn, stage in enumerate(stages)}
        """The turn of each stage; of one, where sums are sent as a whole."""
        cuts = [[self._cut_stage(each, stage) for stage in stages] for each in self.partitions]
        self.summed = [list(chain.from_iterable(each)) for each in cuts]
        self._bounds = [[0, *accumulate(map(len, each))] for each in cuts]
        """For each device, where the chunks of each turn begin among all of them."""

    def _learn_turns(self) -> None:
        """Take the order in which the stages came on the first device to which all have come."""
        if self._learns:
            self._learns -= 1
            orders = self.transport.all_gather_values({self._rank: self._came})
            order = next((each for each in orders if len(each) == len(self._turns)), None)
            if order is not None:
                self._take_turns(order)

    def start_step(self, shares: Shares) -> None:
        # Of a step that failed something may be left.
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
        """Start what has its turn, now that some parts of partial sums are written."""
        self._waiting.update(written)
        while self._written in self._waiting:
            self._waiting.remove(self._written)
            self._start_next()

    def _start_next(self) -> None:
        """Start to send the next part of this device's sums, and to receive the others' next one.

        Every process starts the same parts in the same order, as messages are matched by it.
        """
        number, self._written = self._written, self._written + 1
        slot, turn = divmod(number, len(self._turns))
        shares, operations = self._shares, []
        for peer in self.transport.peers():
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
        while self._written < parts:
            self._start_next()
        shards = {peer: shares.shards_of(peer) for peer in transport.peers()}
        own = table.row(self._rank, shares.shards_of(self._rank))
        rows = {peer: table.empty_row(peer, theirs) for peer, theirs in shards.items()}
        swapped = transport.move([op for peer in rows for op in _swap(peer, [own], [rows[peer]])])
        tables = transport.move(self._tables_to_move(shares))

        def finish() -> None:
            # In this order everywhere, as messages are matched by their order alone.
            for moving in (*self._moving, swapped, tables):
                moving.finish()
            for peer, row in rows.items():
                table.take_row(peer, shards[peer], row)
            # The table is complete and the same everywhere, so that all bring everybody's buffers
            # or none does: if a shard changed any.
            if table.changed.any():
                transport.move(self._rows_to_move(shares, [table.rows_memory])).finish()
            self._learn_turns()

        def wait_for(number: int) -> None:
            turn = bisect_right(self._bounds[self._rank], number) - 1
            for moving in self._moving[turn :: len(self._turns)]:
                moving.finish() if self.storage.mirrors else moving.wait_for(number)

        # The sums may still be on their way: the owner adds each chunk as it comes.
        return Arrivals(wait_for, finish)

    def partial(self, place: Published) -> PartitionSums:
        return self._own[place.slot] if place.device == self._rank else self._received[place]

    def publish_parameters(self) -> None:
        # While nobody has all parameters, each is with its owner, and stays there.
        if self.trained[self._rank].is_there:
            self._all_gather(self.trained[self._rank], self._updated)

    def all_gather_gradient(self, whole: FlatTensors) -> None:
        self._all_gather(whole, self.summed)

    def _all_gather(self, flat: FlatTensors, chunks: Sequence[Sequence[Chunk]]) -> None:
        # Straight into the memory: each stretch has one owner, so no two messages overlap.
        operations = []
        for peer in self.transport.peers():
            operations += _moves(True, peer, flat, chunks[self._rank])
            operations += _moves(False, peer, flat, chunks[peer])
        self.transport.move(operations).finish()

    def _tables_to_move(self, shares: Shares) -> list[Operation]:
        """List what leaves and comes of the tables that lie on a device: totals, then values."""
        # Those on the host travel with the row; these go by themselves, so that the host need not
        # wait for the device to know them.
        if self.table.on_host:
            return []
        values = [self.table.values] if self.table.width else []
        return self._rows_to_move(shares, [self.table.numbers, *values])

    def _rows_to_move(self, shares: Shares, tables: Sequence[torch.Tensor]) -> list[Operation]:
        """List what leaves (our shards' rows) and comes (those of all others) of some tables."""
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

    Within `in_pipeline` only those devices hear each other that compute the same stages.

    Args:
        memory: of this device; the allocator of its transport keeps what comes, if the device is
            the processor.
    """

    prefetches = True

    def __init__(self, memory: CollectiveMemory) -> None:
        assignment, self._transport = memory.assignment, memory.transport
        super().__init__(memory.storage, assignment, self._transport.rank)
        self._everybody = range(self._transport.size)
        self._column = assignment.shares.column_of(self.rank)
        """The devices that compute the same stages, this one too."""
        self._among: Sequence[int] = self._everybody
        self._underway: list[Moving] = []
        """Parameters that were requested ahead of their use, here or elsewhere."""
        # Frozen parameters with them.
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
            self._fill(call, self._numbered(self._kept[self.rank][call.stage]))
            return []
        headers = self._all_gather_headers(transport, self._among, call)
        others = [header for rank, header in headers.items() if rank != self.rank]
        # One copy for all that request a stage, where it is kept elsewhere than on the device.
        requested = {header.stage for header in others if header.is_request}
        kept = self._kept[self.rank]
        own = {
            stage: [(n, each.to(transport.device)) for n, each in self._numbered(kept[stage])]
            for stage in requested
        }
        # For each pair of devices, what one end sends is listed as the other lists its receipts.
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
        # In one order everywhere, and begun before anything is waited for.
        moving, prefetched = transport.move(at_once), transport.move(ahead)
        self._underway += [prefetched] if ahead else []
        if isinstance(call, ParameterRequest):
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
        """Whether nobody else takes part in a request: outside of a pipeline's shards."""
        kept, everything = self._kept[self.rank][stage], self.partitioned_layout.segments[stage]
        # What lies in no stage all devices request, and so its owner takes part as well.
        return self._among != self._column and stage != ROOT and len(kept) == len(everything) > 0

    def _awaited(self, call: StageMessage, peer: int) -> list[torch.Tensor]:
        """Where what a device has of the parameters that this one requests is to lie."""
        if not isinstance(call, ParameterRequest):
            return []
        layout = self.partitioned_layout
        return [layout.in_room(n, call.buffer) for n in self._kept[peer][call.stage]]

    def _new_segment(self, number: int) -> torch.Tensor:
        """Memory for the gradient of a segment: (numel,)."""
        _, nbytes, dtype = self.layout.places[number]
        device = self._transport.device
        if device.type == "cpu":
            return self._transport.allocator.empty(nbytes).view(dtype)
        return torch.empty(nbytes // dtype.itemsize, dtype=dtype, device=device)
