"""Memory that the processes of one host share, and what they send to each other through it.

In `HostMemory` the parameters exist once, and every process computes with them where they are. They
lie in a file without a name, partial sums and the board in another, which the lead makes and hands
to the others. `new_file` makes such memory, which is handed over by descriptor; `take_file`
receives it.

`HostCarrier` brings gradients to their owners through shared memory, and `HostRelay` passes tensors
in files without a name. `HostTransport` reaches the other processes: words go through sockets,
bytes through shared files.

Note: files cut alike everywhere
--------------------------------
Every process computes the same sizes from the same `Storage` and cuts the files in the same order;
no offset is ever sent. Nothing here is locked. The meetings of a step keep writers and readers
apart (see `onefold.exchange.exchange`): ``meet`` returns in no process before all have called it,
and so have made their earlier writes.

Note: two boxes for each device
-------------------------------
A device copies what is for others into a box in shared memory, and the owners read it there after
the meeting of the event. It writes into its other box in the next event, so nobody has to wait
until all have read: by the time it comes back to the first box there has been another meeting,
which the owners entered when they were done with reading.

Note: who may write to a room
-----------------------------
`bring` copies nothing: the lead maps the very memory that each process has filled, and may read it
as long as it keeps the tensors. So nobody fills its room again before the lead is done with it;
`onefold.checkpoint.resume` waits for the writing of a checkpoint before it packs the next one.

Note: how long it lives
-----------------------
The kernel frees the file once nobody has it open or mapped, whatever ended the processes, so
nothing can be left behind. A mapping lasts without its descriptor, and the tensor keeps the mapping
alive: so a receiver closes the descriptor at once, and holds the memory for as long as any view of
the tensor exists. A mapping does not grow with its file, so whoever needs more makes a new one.

Note: how it becomes a process's own
------------------------------------
Other memory is mapped over the very same addresses (`make_own`). So it holds for everything that
refers to it: parameters, tied ones, and what a script has kept of a ``state_dict()``.
"""

from __future__ import annotations

import ctypes
import mmap
import os
from collections.abc import Callable, Sequence
from itertools import accumulate, chain

import torch

from onefold.core.flat import FlatTensors, storage_order
from onefold.core.fold import Published
from onefold.core.roster import Roster
from onefold.core.shard import Plan
from onefold.core.storage import Storage, cut_chunks
from onefold.errors import PeerTimeout
from onefold.exchange.board import Board
from onefold.exchange.carrier import DONE, AtOnce, Brought, Carrier, Gift, Want, Word
from onefold.exchange.exchange import Exchange
from onefold.exchange.mailbox import Mailbox
from onefold.exchange.memory import Arrivals, Memory, Start, write_first
from onefold.exchange.relay import Message, Relay, read_message, room_of, write_message
from onefold.exchange.spans import Partial, Spanned
from onefold.exchange.transport import Transport
from onefold.system.compat import copy_each
from onefold.system.heap import ORDINARY, DiskHeap, Heap, naming_limits, new_disk_file
from onefold.system.ownfiles import memory_file

__all__ = ["HostMemory", "shared_exchange"]


_MAP_FIXED = 0x10
"""As Linux has it on all processors that PyTorch runs on; Python does not name it."""


def new_file(size_bytes: int, heap: Heap = ORDINARY) -> tuple[int, torch.Tensor]:
    """Make a file without a name, and map it: its descriptor and (size,) uint8 of zeros.

    Pages that nobody touches take no memory. The caller closes the descriptor.

    Args:
        size_bytes: of the file.
        heap: if it is on a disk, the file is there as well; else it is in memory.
    """
    if isinstance(heap, DiskHeap):
        descriptor = new_disk_file(heap.folder, max(size_bytes, 1))
    else:
        descriptor = memory_file()
    try:
        with naming_limits(f"{size_bytes:,} bytes of memory that all devices of this host share"):
            # At least a byte: an empty file cannot be mapped.
            os.ftruncate(descriptor, max(size_bytes, 1))
            return descriptor, memory_of(descriptor)
    except BaseException:
        os.close(descriptor)
        raise


def take_file(mailbox: Mailbox, rank: int) -> torch.Tensor:
    """Receive a file from another process, and map it: (size,) uint8."""
    descriptor = mailbox.receive_file(rank)
    try:
        return memory_of(descriptor)
    finally:
        os.close(descriptor)


def memory_of(descriptor: int) -> torch.Tensor:
    """Map an open file as (size,) uint8, shared with everybody else who maps it."""
    size_bytes = os.fstat(descriptor).st_size
    return torch.frombuffer(mmap.mmap(descriptor, size_bytes), dtype=torch.uint8)


def make_own(memory: torch.Tensor, heap: Heap = ORDINARY) -> None:
    """Have other processes no longer see what is written to shared memory, nor this one theirs.

    Its values stay, and its address. Nobody may write to it meanwhile.

    Args:
        memory: (size,) uint8, a mapping that begins on a page.
        heap: if it is on a disk, the values then lie in a file of this process there.

    Raises:
        OSError: there is no room for a copy.
    """
    if not memory.numel():
        return
    if isinstance(heap, DiskHeap):
        descriptor, copy = new_file(memory.numel(), heap)
        copy.copy_(memory)
        flags = mmap.MAP_SHARED
    else:
        descriptor, copy, flags = -1, memory.clone(), mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS
    try:
        _map_over(memory, flags, descriptor)
    finally:
        if descriptor >= 0:
            os.close(descriptor)
    if descriptor < 0:
        memory.copy_(copy)


def _map_over(memory: torch.Tensor, flags: int, descriptor: int) -> None:
    """Map something else where a mapping is; Python's object for that will unmap it as well."""
    libc = ctypes.CDLL(None, use_errno=True)
    libc.mmap.restype = ctypes.c_void_p
    libc.mmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t, *[ctypes.c_int] * 3, ctypes.c_long]
    access = mmap.PROT_READ | mmap.PROT_WRITE
    address = memory.data_ptr()
    found = libc.mmap(address, memory.numel(), access, flags | _MAP_FIXED, descriptor, 0)
    if found != address:
        number = ctypes.get_errno()
        raise OSError(number, f"{os.strerror(number)}: no room for a copy of the model")


_PAGE_BYTES = 4096


def shared_exchange(
    storage: Storage, start: Start, mailbox: Mailbox, roster: Roster, heap: Heap = ORDINARY
) -> Exchange:
    """Make the exchange of one process of several on a host; all must call this together.

    Args:
        storage: the sizes.
        start: this process's values, replaced by the lead's.
        mailbox: connects the processes; closed with the exchange.
        roster: who takes part.
        heap: where the model lies.
    """
    memory = HostMemory(storage, start, HostTransport(mailbox, heap), heap)
    plan = roster.plan
    relay = HostRelay(mailbox, plan.line) if plan.line > 1 else None
    carrier: Carrier | None = None
    if storage.stages is not None:
        column = plan.column_of(mailbox.rank)
        # In one line each device owns the stages that it computes: their gradients go nowhere.
        if len(column) == 1:
            carrier = AtOnce(storage)
        else:
            carrier = HostCarrier(storage, memory.transport, memory.boxes, column)
    return Exchange(storage, memory, memory.transport, roster, carrier, relay)


class HostMemory(Memory):
    """The memory of one process of several on this host; all must make it together.

    Args:
        storage: the sizes.
        start: this process's values, replaced by the lead's.
        transport: connects the processes.
        heap: where the model lies.
    """

    is_common = True

    def __init__(
        self, storage: Storage, start: Start, transport: HostTransport, heap: Heap = ORDINARY
    ) -> None:
        self.heap = heap
        self.transport = transport
        mailbox = transport.mailbox
        self._rank = mailbox.rank
        self._storage = storage
        shape = storage.board
        trained, other = _map_shared(
            mailbox, [storage.parameters.nbytes, storage.other.nbytes], heap
        )
        self._of_parameters: tuple[torch.Tensor, ...] = trained, other
        # Taken from the iterator below in this very order, in every process.
        sizes = [sum(shape.host_bytes), shape.device_bytes]
        sizes += [storage.gradients.nbytes] * (storage.slots * storage.devices)
        if storage.stages is not None:
            sizes += [storage.stage_layout().nbytes] * (2 * storage.devices)
        memories = iter(_map_shared(mailbox, sizes, ORDINARY))
        self.trained = {self._rank: FlatTensors(storage.parameters, memory=trained)}
        self.other = {self._rank: FlatTensors(storage.other, memory=other)}
        self.board = Board(shape, next(memories), next(memories))
        self._own: list[Partial] = []
        self._partials: dict[Published, Spanned] = {}
        # This process's partial sums may stay where backward left them; of the others' it sees only
        # what lies in the file, and so they are plain memory.
        for device in range(storage.devices):
            for slot in range(storage.slots):
                flat = FlatTensors(storage.gradients, memory=next(memories))
                if device == self._rank:
                    self._own.append(Partial(flat))
                self._partials[Published(device, slot)] = (
                    self._own[slot] if device == self._rank else flat
                )
        self.boxes = list(zip(memories, memories, strict=True))
        """Where each device puts what it gives to others, if the model has stages: two, each
        (bytes of the largest stage,) uint8."""
        # The lead alone: the memory is everybody's. `follow_lead` makes the others wait for it.
        if self._rank == 0:
            write_first(self.trained[0], start.trained)
            write_first(self.other[0], start.other)
        self.follow_lead(start.buffers)

    def bind(self, roster: Roster) -> None:
        storage = self._storage
        self._summed = [
            cut_chunks(storage.gradients, storage.pieces_of(span)) for span in roster.spans
        ]
        # What the other owners will read of our gradients must be in the file, not with backward.
        others = (chunks for n, chunks in enumerate(self._summed) if n != self._rank)
        visible = list(chain.from_iterable(others))
        for partial in self._own:
            partial.show(visible)

    def follow_lead(self, buffers: FlatTensors) -> None:
        # Parameters are shared anyhow; only buffers travel, through a row that no step uses now.
        row = self.board.buffer_rows[0]
        if self._rank == 0:
            row.write(buffers.views)
        # The first meeting: the lead has written all. The second: everybody has read it, so that
        # shard 0 may write to the row again.
        self.transport.meet()
        buffers.write(row.views)
        self.transport.meet()

    def adopt_lead(self, values: torch.Tensor) -> None:
        pass  # all compute with the lead's values

    def publish(self, device: int, slot: int, gradients: Sequence[torch.Tensor | None]) -> None:
        self._own[slot].write(gradients)

    def collect(self, plan: Plan) -> Arrivals | None:
        # Once all are here, every partial sum lies in the file: nothing is left on its way.
        self.transport.meet()
        return None

    def collect_board(self, plan: Plan) -> None:
        self.transport.meet()

    def partial(self, place: Published) -> Spanned:
        return self._partials[place]

    def hand_on(self) -> None:
        # Owners updated the one copy of the parameters; it remains to wait for all of them.
        self.transport.meet()

    def share_gradient(self, whole: FlatTensors) -> None:
        # The stretch of its own span in its own first partial sum is read by nobody but the owner,
        # whose fold is over: see the notes of `onefold.exchange.spans`.
        own = self._own[0].flat
        for chunk in self._summed[self._rank]:
            own.chunk(chunk).copy_(whole.chunk(chunk))
        # The first meeting: all have written. The second: all have read, and may write again.
        self.transport.meet()
        for owner, chunks in enumerate(self._summed):
            source = self._partials[Published(owner, 0)]
            for chunk in chunks if owner != self._rank else ():
                whole.chunk(chunk).copy_(source.chunk(chunk))
        self.transport.meet()

    def release(self) -> None:
        for partial in self._own:
            partial.release()

    def make_own(self) -> None:
        for memory in self._of_parameters:
            make_own(memory, self.heap)
        self._of_parameters = ()  # it is by now


def _map_shared(mailbox: Mailbox, sizes: Sequence[int], heap: Heap) -> list[torch.Tensor]:
    """Map stretches of memory that all processes share, each (size,) uint8 of zeros.

    Pages that nobody touches take no memory, so room for plans that never come costs nothing.
    """
    # Each stretch starts on a page of its own, and so is aligned for any dtype.
    rounded = [-(-max(size, 1) // _PAGE_BYTES) * _PAGE_BYTES for size in sizes]
    starts = list(accumulate(rounded, initial=0))
    memory = _common_memory(mailbox, starts[-1], heap)
    return [memory[a : a + size] for a, size in zip(starts[:-1], sizes, strict=True)]


def _common_memory(mailbox: Mailbox, size_bytes: int, heap: Heap) -> torch.Tensor:
    if mailbox.rank != 0:
        return take_file(mailbox, 0)
    descriptor, memory = new_file(size_bytes, heap)
    try:
        for rank in range(1, mailbox.size):
            mailbox.send_file(rank, descriptor)
    finally:
        os.close(descriptor)  # the mapping stays, and a message under way holds the file itself
    return memory


class HostRelay(Relay):
    """The relay of one process of several on a host.

    Args:
        mailbox: connects the processes.
        line: how many devices a line has.
    """

    def __init__(self, mailbox: Mailbox, line: int) -> None:
        self._mailbox = mailbox
        self._line = line

    def send(self, device: int, target: int, message: Message) -> None:
        head, nbytes = room_of(message)
        descriptor, room = new_file(nbytes)
        # Closed at once: what was sent holds the file until the other device has received it.
        try:
            write_message(message, room)
            self._mailbox.send_note(target, head)
            self._mailbox.send_file(target, descriptor)
        finally:
            os.close(descriptor)

    def receive(self, device: int, source: int) -> Message:
        try:
            head = self._mailbox.receive_note(source)
            return read_message(head, take_file(self._mailbox, source))
        except PeerTimeout as error:
            beyond = source + (source - device)
            if beyond // self._line != source // self._line:
                raise
            # It does not say for whom it waits itself.
            raise PeerTimeout(
                f"{error}. In a line, device {source} may itself have waited for device {beyond}",
                device=error.device,
                step=error.step,
            ) from None

    def finish(self) -> None:
        pass  # what was sent lies in files

    def clear(self) -> None:
        pass  # a step that fails here ends the run for all processes


class HostCarrier(Carrier):
    """The carrier of one process of several on a host.

    Args:
        storage: the sizes.
        transport: connects the processes.
        boxes: two for each device, each (nbytes of the largest stage,) uint8, the same memory in
            all processes.
        among: the devices that give each other what they have computed, this one too.
    """

    def __init__(
        self,
        storage: Storage,
        transport: HostTransport,
        boxes: Sequence[Sequence[torch.Tensor]],
        among: Sequence[int],
    ) -> None:
        super().__init__(storage)
        self._transport = transport
        self._among = among
        self._boxes = boxes
        self._rank = transport.mailbox.rank
        self._turn = 0

    def bind(self, roster: Roster) -> None:
        own = frozenset(roster.spans[self._rank])
        self._mine = [[n for n in numbers if n in own] for numbers in self.layout.pieces]
        self._others = [[n for n in numbers if n not in own] for numbers in self.layout.pieces]

    def carry(self, gift: Gift | Want | None) -> list[Brought]:
        if isinstance(gift, Gift):
            leaving = self.own_pieces(gift, self._others[gift.stage])
            if leaving:
                targets = [self._in_box(self._rank, number) for number in leaving]
                copy_each(targets, [storage_order(piece) for piece in leaving.values()])
        word = DONE if gift is None else gift.word
        words = self._transport.meet_among(self._among, word.packed(max(self.sizes)))
        pairs = zip(self._among, words, strict=True)
        brought = [self._read(rank, each, gift) for rank, each in pairs]
        self._turn = 1 - self._turn
        return brought

    def await_rooms(self) -> None:
        pass  # in shared memory all parameters are there

    def _read(self, rank: int, packed: bytes, gift: Gift | Want | None) -> Brought:
        word = Word.read(packed, self.sizes)
        if not word.is_gift:
            return Brought(word, {}, False)
        mine = self._mine[word.stage]
        if rank == self._rank and isinstance(gift, Gift):
            # Lent: kept, these views would keep all of the gradients that they are a part of.
            return Brought(word, self.own_pieces(gift, mine), True)
        there = [number for number in mine if self.gave(word, number)]
        pieces = {number: self.shaped(self._in_box(rank, number), number) for number in there}
        return Brought(word, pieces, True)

    def _in_box(self, rank: int, number: int) -> torch.Tensor:
        """Where a piece lies in a device's box of this event: (numel,)."""
        return self.layout.in_room(number, self._boxes[rank][self._turn])


class HostTransport(Transport):
    """One process of several on this host.

    Args:
        mailbox: connects the processes; closed with this transport.
        heap: where its `room` lies, and what it hands out.
    """

    def __init__(self, mailbox: Mailbox, heap: Heap = ORDINARY) -> None:
        self.mailbox = mailbox
        self._heap = heap
        self._room: tuple[int, torch.Tensor] | None = None

    def begin_step(self, step: int) -> None:
        self.step = self.mailbox.step = step

    def meet(self, word: bytes = b"") -> Sequence[bytes]:
        return self.mailbox.meet(word)

    def meet_among(self, devices: Sequence[int], word: bytes) -> Sequence[bytes]:
        """As `meet`, of some devices alone, which are named in ascending order."""
        return self.mailbox.meet(word, devices)

    def room(self, nbytes: int) -> torch.Tensor:
        # A larger room is a new file; the lead may still have the old one mapped.
        if self._room is None or self._room[1].numel() < nbytes:
            self._drop_room()
            self._room = new_file(nbytes, self._heap)
        return self._room[1]

    def bring(self) -> list[torch.Tensor]:
        if self._room is None:
            raise ValueError("there is nothing to bring: fill a room first")
        descriptor, memory = self._room
        mailbox = self.mailbox
        if mailbox.rank != 0:
            mailbox.send_file(0, descriptor)
            return []
        return [memory, *(take_file(mailbox, peer) for peer in range(1, mailbox.size))]

    def hand_out(self, make: Callable[[int], torch.Tensor] | None) -> torch.Tensor:
        if make is None:
            return take_file(self.mailbox, 0)
        for peer in range(1, self.mailbox.size):
            made = make(peer)
            descriptor, memory = new_file(made.numel(), self._heap)
            # Written before it is sent, as receiving it is all that the peer waits for.
            memory[: made.numel()] = made
            # Closed at once: the message holds the file until the peer has received it.
            try:
                self.mailbox.send_file(peer, descriptor)
            finally:
                os.close(descriptor)
        return make(0)

    def close(self, failure: BaseException | None = None) -> None:
        # The reason first: once the sockets are closed nobody can be told.
        if failure is not None:
            self.mailbox.tell_failure(failure)
        else:
            self.mailbox.tell_end()
        self.mailbox.close()
        self._drop_room()

    def _drop_room(self) -> None:
        if self._room is not None:
            os.close(self._room[0])
            self._room = None
