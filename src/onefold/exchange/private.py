"""Memory of one process of several that cannot see each other's: tensors are moved.

In `PrivateMemory` partial sums go from every device straight to the owner of each span, and the
updated spans straight back to everybody. `GroupCarrier` brings gradients to their owners through
torch.distributed as well, and so does `GroupRelay` the tensors that devices of a line pass to each
other.

Note: what is in flight, and who may touch it
---------------------------------------------
``collect`` starts sending the other owners' spans of this device's partial sums, and receiving its
own span of theirs. Until ``finish`` the transport still reads what it sends. The device may add to
a chunk of its span all the same, once that has arrived: a span is sent to its owner alone, so this
device's part of its own span is in no message. ``hand_on`` receives into the parameters themselves;
nobody computes with them between ``collect`` and ``spread``.

Note: by way of the host
------------------------
Tensors of a GPU are copied to the host and sent from there. Between two neighbours of a line
messages go both ways at one time, which NCCL cannot have without both ends naming them in one order
(it would wait for ever); the host's connections can.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager

import torch

from onefold.core.flat import Chunk, FlatTensors, storage_order
from onefold.core.fold import Published, blocks_of
from onefold.core.roster import Roster
from onefold.core.shard import Plan, runs_of
from onefold.core.stages import ROOT
from onefold.core.storage import Storage, cut_chunks
from onefold.exchange.board import Board
from onefold.exchange.carrier import DONE, Brought, Carrier, Gift, Want, Word
from onefold.exchange.collective import GroupTransport, Moving, Operation
from onefold.exchange.exchange import Exchange
from onefold.exchange.memory import Arrivals, FrozenMemory, Memory, Start, new_flat, write_first
from onefold.exchange.relay import Message, Relay, read_message, room_of, write_message
from onefold.exchange.spans import Partial, Spanned, SpanTensors
from onefold.system.heap import ORDINARY, Heap

__all__ = ["PrivateMemory", "collective_exchange"]


def collective_exchange(
    storage: Storage,
    start: Start,
    transport: GroupTransport,
    roster: Roster,
    heap: Heap = ORDINARY,
) -> Exchange:
    """Make the exchange of one process of a group; every process must call this together.

    Args:
        storage: the sizes.
        start: this process's values, replaced by the lead's.
        transport: to the other devices.
        roster: who takes part.
        heap: where this process has its model, if its device is the processor, or keeps nothing.
    """
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


class GroupCarrier(Carrier):
    """The carrier of one process of a group.

    Args:
        storage: the sizes.
        transport: to the other devices.
        heap: where what comes is kept, if the device is the processor.
        among: the devices that give each other what they have, this one too.
    """

    def __init__(
        self, storage: Storage, transport: GroupTransport, heap: Heap, among: Sequence[int]
    ) -> None:
        super().__init__(storage)
        self._heap = heap
        self._transport = transport
        self._among = among
        # Not all begin with the same one.
        self._peers = [peer for peer in transport.peers() if peer in among]
        self._underway: list[Moving] = []
        """Parameters that were wanted ahead of their use, here or elsewhere."""

    def bind(self, roster: Roster) -> None:
        spans = [frozenset(span) for span in roster.spans]
        self._owned = [
            [[n for n in numbers if n in span] for numbers in self.layout.pieces] for span in spans
        ]
        # Frozen parameters with them.
        kept = map(frozenset, self.storage.kept(roster.spans))
        self._kept = [
            [[n for n in numbers if n in own] for numbers in self.lent.pieces] for own in kept
        ]

    def carry(self, gift: Gift | Want | None) -> list[Brought]:
        transport = self._transport
        word = DONE if gift is None else gift.word
        packed = word.packed(max(self.sizes, default=0))
        words = {
            rank: Word.read(each, self.sizes)
            for rank, each in zip(
                self._among, transport.meet_among(self._among, packed), strict=True
            )
        }
        # For each pair of devices, what one end sends is listed as the other lists its receipts.
        at_once: list[Operation] = []
        ahead: list[Operation] = []
        coming = {}
        for peer in self._peers:
            coming[peer] = self._rooms(words[peer])
            at_once += [Operation(True, peer, part) for part in self._given(gift, peer)]
            at_once += [Operation(False, peer, room) for room in coming[peer].values()]
            asked = ahead if words[peer].is_ahead else at_once
            asked += [Operation(True, peer, part) for part in self._asked(words[peer])]
            awaited = ahead if word.is_ahead else at_once
            awaited += [Operation(False, peer, room) for room in self._awaited(gift, peer)]
        # In one order everywhere, and begun before anything is waited for.
        moving = [transport.move(operations) for operations in (at_once, ahead)]
        if ahead:
            self._underway.append(moving[1])
        if isinstance(gift, Want):
            self.fill(gift, self.kept(gift.stage))
        if isinstance(gift, Want) and not gift.ahead:
            moving[0].finish()
        return [
            self._brought(rank, each, gift, coming)._replace(arrive=moving[0].finish)
            for rank, each in words.items()
        ]

    def await_rooms(self) -> None:
        while self._underway:
            self._underway.pop(0).finish()

    def has_all_of(self, stage: int) -> bool:
        """Whether a stage has parameters, and all of them are this process's."""
        return len(self.kept(stage)) == len(self.lent.pieces[stage]) > 0

    def kept(self, stage: int) -> list[int]:
        """The pieces of a stage that are this process's, frozen ones with them."""
        return self._kept[self._transport.rank][stage]

    def _given(self, gift: Gift | Want | None, peer: int) -> list[torch.Tensor]:
        """What a device is sent of a gift."""
        if not isinstance(gift, Gift):
            return []
        own = self.own_pieces(gift, self._owned[peer][gift.stage])
        return [storage_order(piece) for piece in own.values()]

    def _asked(self, word: Word) -> list[torch.Tensor]:
        """What a device wants that is this one's."""
        if not word.is_want:
            return []
        device = self._transport.device
        return [self._values(number).to(device) for number in self.kept(word.stage)]

    def _awaited(self, gift: Gift | Want | None, peer: int) -> list[torch.Tensor]:
        """Where what a device has of the parameters that this one wants is to lie."""
        if not isinstance(gift, Want):
            return []
        return [self.lent.in_room(number, gift.room) for number in self._kept[peer][gift.stage]]

    def _brought(
        self,
        rank: int,
        word: Word,
        gift: Gift | Want | None,
        coming: Mapping[int, Mapping[int, torch.Tensor]],
    ) -> Brought:
        if not word.is_gift:
            return Brought(word, {}, False)
        if rank == self._transport.rank and isinstance(gift, Gift):
            own = self._owned[rank][word.stage]
            # Lent: kept, these views would keep all of the gradients they are a part of.
            lent = len(own) < len(self.layout.pieces[word.stage])
            return Brought(word, self.own_pieces(gift, own), lent)
        pieces = {number: self.shaped(room, number) for number, room in coming[rank].items()}
        return Brought(word, pieces, False)

    def _rooms(self, word: Word) -> dict[int, torch.Tensor]:
        """Make room for what a device sends: (numel,) for each of this process's pieces."""
        if not word.is_gift:
            return {}
        rooms = {}
        for number in self._owned[self._transport.rank][word.stage]:
            if self.gave(word, number):
                _, nbytes, dtype = self.layout.place(number)
                rooms[number] = self._room(nbytes, dtype)
        return rooms

    def _room(self, nbytes: int, dtype: torch.dtype) -> torch.Tensor:
        device = self._transport.device
        if device.type == "cpu":
            return self._heap.empty(nbytes).view(dtype)
        return torch.empty(nbytes // dtype.itemsize, dtype=dtype, device=device)


class LineCarrier(Carrier):
    """The carrier of one process in lines of devices.

    In a step, only those devices hear each other that compute the same stages; see `in_line`.

    Args:
        everybody: between all devices.
        column: between those that compute the same.
    """

    def __init__(self, everybody: GroupCarrier, column: GroupCarrier) -> None:
        super().__init__(everybody.storage)
        self._everybody, self._column = everybody, column
        self._now = everybody

    def bind(self, roster: Roster) -> None:
        self._everybody.bind(roster)
        self._column.bind(roster)

    def await_rooms(self) -> None:
        self._everybody.await_rooms()
        self._column.await_rooms()

    def lend(self, values: Callable[[int], torch.Tensor]) -> None:
        self._everybody.lend(values)
        self._column.lend(values)

    @contextmanager
    def in_line(self) -> Iterator[None]:
        self._now = self._column
        try:
            yield
        finally:
            self._now = self._everybody

    def carry(self, gift: Gift | Want | None) -> list[Brought]:
        if (
            isinstance(gift, Want)
            and self._now is self._everybody
            # What lies in no stage all devices want, and so its owner takes part as well.
            and gift.stage != ROOT
            and self._everybody.has_all_of(gift.stage)
        ):
            self._everybody.fill(gift, self._everybody.kept(gift.stage))
            return []
        return self._now.carry(gift)


class GroupRelay(Relay):
    """The relay of one process of a group.

    Args:
        transport: to the other devices.
    """

    def __init__(self, transport: GroupTransport) -> None:
        self._transport = transport

    def send(self, device: int, target: int, message: Message) -> None:
        head, nbytes = room_of(message)
        room = torch.empty(nbytes, dtype=torch.uint8)
        write_message(message, room)
        sizes = torch.tensor([len(head), nbytes])
        self._transport.begin_sending(target, sizes)
        self._transport.begin_sending(target, torch.frombuffer(bytearray(head), dtype=torch.uint8))
        self._transport.begin_sending(target, room)

    def receive(self, device: int, source: int) -> Message:
        sizes = torch.empty(2, dtype=torch.int64)
        self._transport.receive(source, sizes)
        length, nbytes = sizes.tolist()
        head, room = (torch.empty(n, dtype=torch.uint8) for n in (length, nbytes))
        self._transport.receive(source, head)
        self._transport.receive(source, room)
        return read_message(head.numpy().tobytes(), room)

    def finish(self) -> None:
        self._transport.finish_sending()

    def clear(self) -> None:
        self._transport.finish_sending()
