"""Memory of one process of several that cannot see each other's: tensors are moved.

Partial sums go from every device straight to the owner of each span, and the updated spans straight
back to everybody.

Note: what is in flight, and who may touch it
---------------------------------------------
``collect`` starts sending the other owners' spans of this device's partial sums, and receiving its
own span of theirs. Until ``finish`` the transport still reads what it sends. The device may add to
a chunk of its span all the same, once that has arrived: a span is sent to its owner alone, so this
device's part of its own span is in no message. ``hand_on`` receives into the parameters themselves;
nobody computes with them between ``collect`` and ``spread``.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from onefold.core.cutting import cut_chunks
from onefold.core.flat import Chunk, FlatTensors
from onefold.core.fold import Published, blocks_of
from onefold.core.roster import Roster
from onefold.core.shard import Plan, runs_of
from onefold.core.storage import Storage
from onefold.exchange.board import Board
from onefold.exchange.carrier import Carrier
from onefold.exchange.collective import GroupTransport, Moving, Operation
from onefold.exchange.exchange import Exchange
from onefold.exchange.frozenmemory import FrozenMemory
from onefold.exchange.group import Joined
from onefold.exchange.groupcarrier import GroupCarrier, LineCarrier
from onefold.exchange.grouprelay import GroupRelay
from onefold.exchange.memory import Arrivals, Memory, Start, new_flat, write_first
from onefold.exchange.spans import Partial, Spanned, SpanTensors
from onefold.system.heap import ORDINARY, Heap

__all__ = ["PrivateMemory", "collective_exchange"]


def collective_exchange(
    storage: Storage,
    start: Start,
    joined: Joined,
    roster: Roster,
    timeout_s: float,
    heap: Heap = ORDINARY,
) -> Exchange:
    """Make the exchange of one process of a group; every process must call this together.

    Args:
        storage: the sizes.
        start: this process's values, replaced by the lead's.
        joined: the process group, whose ranks are the devices' numbers.
        roster: who takes part.
        timeout_s: the limit of the group, for error messages.
        heap: where this process has its model, if its device is the processor, or keeps nothing.
    """
    transport = GroupTransport(roster.devices[joined.group.rank()], joined, timeout_s, heap)
    memory = PrivateMemory(storage, start, transport, heap)
    plan = roster.plan
    carrier: Carrier | None = None
    if storage.stages is not None:
        carrier = everybody = GroupCarrier(storage, transport, heap, range(plan.devices))
        if plan.line > 1:
            column = GroupCarrier(storage, transport, heap, plan.column_of(transport.rank))
            carrier = LineCarrier(everybody, column)
    relay = GroupRelay(transport) if plan.line > 1 else None
    return Exchange(storage, memory, transport, roster, carrier, relay)


class PrivateMemory(Memory):
    """One device's memory, with room for the others' partial sums over the span that it owns.

    Args:
        storage: the sizes.
        start: this process's values, replaced by the lead's.
        transport: to the other devices.
        heap: where the model lies, if the device is the processor, or keeps nothing.
    """

    def __init__(
        self,
        storage: Storage,
        start: Start,
        transport: GroupTransport,
        heap: Heap = ORDINARY,
    ) -> None:
        self.heap = heap
        self._storage = storage
        self._transport = transport
        self._rank = rank = transport.rank
        device = transport.device
        self._own: dict[int, Partial] = {}
        self._received: dict[Published, SpanTensors] = {}
        self.board = Board.private(storage.board, device)
        # A file takes no memory where there is none to spare; all else is with its owners.
        self.is_lent = storage.stages is not None and (heap.apart or not heap.on_disk)
        self.other = {rank: new_flat(storage.other, device, heap)}
        write_first(self.other[rank], start.other)
        if self.is_lent:
            # Their owners are given the first values one parameter after the other.
            self.trained = {rank: FlatTensors(storage.parameters, device=device, there=False)}
        else:
            self.trained = {rank: new_flat(storage.parameters, device, heap)}
            write_first(self.trained[rank], start.trained)
        if storage.frozen is not None:
            self.frozen = FrozenMemory(storage, storage.frozen, rank, device, heap)
        self.follow_lead(start.buffers)

    def bind(self, roster: Roster) -> None:
        storage = self._storage
        spans = [storage.pieces_of(span) for span in roster.spans]
        self._span = spans[self._rank]
        self._summed = [cut_chunks(storage.gradients, span) for span in spans]
        self._updated = [cut_chunks(storage.parameters, span) for span in spans]
        # Sized for the old span: made anew when the first partial sum comes.
        self._received = {}

    def follow_lead(self, buffers: FlatTensors) -> None:
        flats = [self.trained[self._rank], self.other[self._rank], buffers]
        if self.frozen is not None:
            flats.append(self.frozen.flat)
        self._transport.follow_lead(section for flat in flats for section in flat.sections)
        if self.frozen is not None and self.frozen.flat.is_there:
            self.frozen.keep()

    def adopt_lead(self, values: torch.Tensor) -> None:
        self._transport.follow_lead([values])

    def publish(self, device: int, slot: int, gradients: Sequence[torch.Tensor | None]) -> None:
        self._slot(slot).write(gradients)

    def collect(self, plan: Plan) -> Arrivals | None:
        partials = self._tables_to_move(plan) + self._partials_to_move(plan)
        return self._collected(plan, partials)

    def collect_board(self, plan: Plan) -> None:
        self._collected(plan, self._tables_to_move(plan)).finish()

    def _collected(self, plan: Plan, partials: Sequence[Operation]) -> _Coming:
        """Bring the rows of the board to everybody, and begin to move what else there is."""
        transport = self._transport
        own = self.board.row(self._rank, plan.shards_of(self._rank))
        rows = {
            peer: self.board.empty_row(peer, plan.shards_of(peer)) for peer in transport.peers()
        }
        # Every process starts the rows first and the partial sums second, as messages are matched
        # by their order alone. The sums then travel while the rows are read.
        talk = transport.move([op for peer, row in rows.items() for op in _swap(peer, own, row)])
        moving = transport.move(partials)
        talk.finish()
        for peer, row in rows.items():
            self.board.take_row(peer, plan.shards_of(peer), row)
        # The sums may still be on their way: the owner adds each chunk as it comes.
        return _Coming(self, moving, plan)

    def partial(self, place: Published) -> Spanned:
        if place.device == self._rank:
            return self._slot(place.slot)
        if place not in self._received:
            device = self._transport.device
            self._received[place] = SpanTensors(self._storage.gradients, self._span, device)
        return self._received[place]

    def hand_on(self) -> None:
        # While nobody has all parameters, each is with its owner, and stays there.
        if not self.trained[self._rank].is_there:
            return
        # Straight into the parameters: each stretch has one owner, so no two messages overlap.
        flat = self.trained[self._rank]
        operations = []
        for peer in self._transport.peers():
            operations += _moves(True, peer, flat, self._updated[self._rank])
            operations += _moves(False, peer, flat, self._updated[peer])
        self._transport.move(operations).finish()

    def share_gradient(self, whole: FlatTensors) -> None:
        operations = []
        for peer in self._transport.peers():
            operations += _moves(True, peer, whole, self._summed[self._rank])
            operations += _moves(False, peer, whole, self._summed[peer])
        self._transport.move(operations).finish()

    def release(self) -> None:
        for partial in self._own.values():
            partial.release()

    def gather_buffers(self, plan: Plan) -> None:
        """Gather everybody's buffers, if a shard changed any."""
        # The board is complete and the same everywhere, so that all gather or none does.
        if not self.board.changed.any():
            return
        rows = self.board.rows_memory
        own = plan.shards_of(self._rank)
        # all_gather takes one shape from everybody, and devices may run unequal numbers of shards.
        padded = torch.zeros(max(plan.counts), rows.shape[1], dtype=torch.uint8, device=rows.device)
        padded[: len(own)] = torch.cat([rows[:0], *(rows[run] for run in runs_of(own))])
        for peer, part in enumerate(self._transport.gather(padded)):
            theirs = plan.shards_of(peer)
            place = 0
            for run in runs_of(theirs):
                size = run.stop - run.start
                rows[run] = part[place : place + size]
                place += size

    def _slot(self, slot: int) -> Partial:
        if slot not in self._own:
            self._own[slot] = Partial.private(self._storage.gradients, self._transport.device)
        return self._own[slot]

    def _tables_to_move(self, plan: Plan) -> list[Operation]:
        """List what leaves and comes of the tables that lie on a device: totals, then values."""
        # Those on the host travel with the row; these go by themselves, so that the host need not
        # wait for the device to know them.
        if self.board.on_host:
            return []
        own = plan.shards_of(self._rank)
        operations = []
        for peer in self._transport.peers():
            theirs = plan.shards_of(peer)
            operations += _rows(peer, self.board.totals, own, theirs)
            if self.board.width:
                operations += _rows(peer, self.board.values, own, theirs)
        return operations

    def _partials_to_move(self, plan: Plan) -> list[Operation]:
        """List what leaves (the others' spans of our sums) and comes (our span of theirs).

        For each pair of devices, what one end sends is listed as the other end lists its receipts:
        slot by slot. See the note on matching in `onefold.exchange.collective`.
        """
        own = plan.shards_of(self._rank)
        operations = []
        for peer in self._transport.peers():
            theirs = plan.shards_of(peer)
            for slot in range(len(blocks_of(own, plan.shards))):
                operations += _moves(True, peer, self._slot(slot), self._summed[peer])
            for slot in range(len(blocks_of(theirs, plan.shards))):
                partial = self.partial(Published(peer, slot))
                operations += _moves(False, peer, partial, self._summed[self._rank])
        return operations


class _Coming:
    """Partial sums on their way to this process, and the buffers that follow them."""

    def __init__(self, memory: PrivateMemory, moving: Moving, plan: Plan) -> None:
        self._memory = memory
        self._moving = moving
        self._plan = plan
        self.wait_for = moving.wait_for

    def finish(self) -> None:
        """Wait until everything is received and sent."""
        # In this order everywhere: the gather shares its connections with the moves.
        self._moving.finish()
        self._memory.gather_buffers(self._plan)


def _swap(peer: int, leaving: torch.Tensor, coming: torch.Tensor) -> list[Operation]:
    return [Operation(True, peer, leaving), Operation(False, peer, coming)]


def _rows(
    peer: int, table: torch.Tensor, own: Sequence[int], theirs: Sequence[int]
) -> list[Operation]:
    leaving = [Operation(True, peer, table[run]) for run in runs_of(own)]
    return leaving + [Operation(False, peer, table[run]) for run in runs_of(theirs)]


def _moves(sends: bool, peer: int, memory: Spanned, chunks: Sequence[Chunk]) -> list[Operation]:
    return [Operation(sends, peer, memory.chunk(c), number) for number, c in enumerate(chunks)]
