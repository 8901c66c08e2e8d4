"""Memory that the processes of one host share, and the messages that they send through it.

`SharedMemory` stores the parameters once, and every process computes with them in place. The lead
makes a file without a name for the parameters, and another for partial sums and the table, and
sends their descriptors to the others. `new_file` makes such memory; `take_file` receives it.

`SharedStageExchange` sends gradients to their owners through shared memory. `SharedTransport` sends
short messages through sockets, and other bytes and the tensors of a pipeline through shared files.

Note: no locks
--------------
Every process computes the same sizes from the same `Storage` and cuts the files in the same order;
no offset is ever sent. Nothing here is locked. The barriers of a step separate writers from readers
(see `onefold.exchange.exchange`): ``all_gather_bytes`` returns in no process before all have called
it, and thus finished their earlier writes.

Note: two send buffers for each device
--------------------------------------
A device copies what it sends into a buffer in shared memory, and the owners read it there after the
barrier of the event. In the next event it writes into its other buffer, so it does not have to wait
until all have read: before it returns to the first buffer there is another barrier, which the
owners enter when they have finished reading.

Note: lifetime
--------------
The kernel frees a file when no process has it open or mapped, whatever ended the processes, so
nothing can be left behind.
"""

from __future__ import annotations

import mmap
import os
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from itertools import accumulate, chain

import torch

from onefold.core.assignment import Assignment
from onefold.core.flat import FlatTensors, storage_order
from onefold.core.fold import Published
from onefold.core.shard import Shares
from onefold.core.storage import Storage
from onefold.errors import PeerTimeout
from onefold.exchange.mailbox import Mailbox
from onefold.exchange.memory import Memory, Partial, PartitionSums, Start, write_first
from onefold.exchange.reduction import (
    Delivery,
    GradientSend,
    StageExchange,
    StageMessage,
)
from onefold.exchange.shard_table import ShardTable
from onefold.exchange.transport import (
    Message,
    Ranks,
    Transport,
    head_of,
    read_message,
    write_message,
)
from onefold.system.allocator import DEFAULT_ALLOCATOR, TensorAllocator
from onefold.system.compat import copy_each, hidden_from_modes
from onefold.system.file_memory import MmapAllocator, map_over, naming_limits, new_disk_file
from onefold.system.safe_files import memory_file

__all__ = ["SharedMemory", "SharedStageExchange", "SharedTransport"]


def new_file(
    size_bytes: int, allocator: TensorAllocator = DEFAULT_ALLOCATOR
) -> tuple[int, torch.Tensor]:
    """Make a file without a name; return its descriptor and its mapping, (size,) uint8 zeros.

    The caller closes the descriptor.

    Args:
        size_bytes: size of the file.
        allocator: if it is on a disk, so is the file; otherwise the file is in memory.
    """
    if isinstance(allocator, MmapAllocator):
        descriptor = new_disk_file(allocator.folder, max(size_bytes, 1))
    else:
        descriptor = memory_file()
    try:
        with naming_limits(f"{size_bytes:,} bytes of memory that all devices of this host share"):
            # At least one byte, because an empty file cannot be mapped.
            os.ftruncate(descriptor, max(size_bytes, 1))
            return descriptor, memory_of(descriptor)
    except BaseException:
        os.close(descriptor)
        raise


@contextmanager
def temporary_file(
    size_bytes: int, allocator: TensorAllocator = DEFAULT_ALLOCATOR
) -> Iterator[tuple[int, torch.Tensor]]:
    """Make a file as `new_file` does, to send it in the block; closes its descriptor at the end."""
    descriptor, memory = new_file(size_bytes, allocator)
    # Close the descriptor at once: mappings, and messages in flight, keep the file alive.
    try:
        yield descriptor, memory
    finally:
        os.close(descriptor)


def take_file(mailbox: Mailbox, rank: int) -> torch.Tensor:
    """Receive a file from another process, and map it: (size,) uint8."""
    descriptor = mailbox.receive_file(rank)
    try:
        return memory_of(descriptor)
    finally:
        # The tensor keeps the mapping alive, and the mapping does not need the descriptor.
        os.close(descriptor)


def memory_of(descriptor: int) -> torch.Tensor:
    """Map an open file as (size,) uint8, shared with every process that maps it."""
    size_bytes = os.fstat(descriptor).st_size
    return torch.frombuffer(mmap.mmap(descriptor, size_bytes), dtype=torch.uint8)


def make_own(memory: torch.Tensor, allocator: TensorAllocator = DEFAULT_ALLOCATOR) -> None:
    """Make shared memory private: this process and the others no longer see each other's writes.

    Values and address stay. No thread may write to the memory meanwhile.

    Args:
        memory: (size,) uint8, a mapping that starts at a page boundary.
        allocator: if it is on a disk, the values move to a file of this process there.

    Raises:
        OSError: there is no room for a copy.
    """
    if not memory.numel():
        return
    # Garbage collection may call this at any time, even inside a mode that computes only shapes.
    with hidden_from_modes(), naming_limits("room for a copy of the model"):
        # Map private memory over the same addresses, so that everything that refers to them stays
        # valid, such as tied parameters, or a ``state_dict()`` that the script kept.
        if isinstance(allocator, MmapAllocator):
            with temporary_file(memory.numel(), allocator) as (descriptor, copy):
                copy.copy_(memory)
                map_over(memory.data_ptr(), memory.numel(), mmap.MAP_SHARED, descriptor)
        else:
            copy = memory.clone()
            kind = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS
            map_over(memory.data_ptr(), memory.numel(), kind, -1)
            memory.copy_(copy)


_PAGE_BYTES = 4096


class SharedMemory(Memory):
    """The memory of one of several processes on this host, which all create it together.

    Args:
        storage: the sizes.
        start: this process's values; the lead's replace them.
        transport: connects the processes; its allocator allocates the model.
        assignment: which device runs which shards and owns which parameters.
    """

    is_common = True

    def __init__(
        self, storage: Storage, start: Start, transport: SharedTransport, assignment: Assignment
    ) -> None:
        super().__init__(storage, assignment, transport.allocator)
        self.transport = transport
        mailbox = transport.mailbox
        self._rank = mailbox.rank
        sizes = [storage.parameters.nbytes, storage.other.nbytes]
        self._of_parameters = _map_shared(mailbox, sizes, self.allocator)
        trained, other = self._of_parameters
        # The iterator below is consumed in this order, in every process.
        sizes = [sum(storage.table_host_bytes), storage.table_device_bytes]
        sizes += [storage.gradients.nbytes] * (storage.slots * storage.devices)
        if storage.stages is not None:
            sizes += [storage.stage_layout().nbytes] * (2 * storage.devices)
        memories = iter(_map_shared(mailbox, sizes, DEFAULT_ALLOCATOR))
        self.trained = {self._rank: FlatTensors(storage.parameters, memory=trained)}
        self.other = {self._rank: FlatTensors(storage.other, memory=other)}
        self.table = ShardTable(storage, next(memories), next(memories))
        self._own: dict[int, Partial] = {}
        self._partials: dict[Published, PartitionSums] = {}
        # This process's own partial sums may stay where backward left them. It sees those of other
        # processes only in the file, so they are plain memory.
        for device in range(storage.devices):
            for slot in range(storage.slots):
                flat = FlatTensors(storage.gradients, memory=next(memories))
                self._partials[Published(device, slot)] = flat
                if device == self._rank:
                    self._own[slot] = self._partials[Published(device, slot)] = Partial(flat)
        self.send_buffers = list(zip(memories, memories, strict=True))
        """Send buffers of each device, if the model has stages: two, each (bytes of the largest
        stage,) uint8."""
        # The lead alone writes shared memory; `broadcast_from_lead` makes the others wait.
        if self._rank == 0:
            write_first(self.trained[0], start.trained)
            write_first(self.other[0], start.other)
        self.broadcast_from_lead(start.buffers)
        # Other owners read this device's gradients from the file, so they must be copied there.
        others = (chunks for n, chunks in enumerate(self.summed) if n != self._rank)
        visible = list(chain.from_iterable(others))
        for partial in self._own.values():
            partial.show(visible)

    def broadcast_from_lead(self, buffers: FlatTensors) -> None:
        # Parameters are shared already. Send only buffers, through a row that no step uses now.
        row = self.table.buffer_rows[0]
        if self._rank == 0:
            row.write(buffers.views)
        # First barrier: the lead has written. Second: all have read, so shard 0 may reuse the row.
        self.transport.all_gather_bytes()
        buffers.write(row.views)
        self.transport.all_gather_bytes()

    def publish(self, device: int, slot: int, gradients: Sequence[torch.Tensor | None]) -> None:
        self._own[slot].write(gradients)

    def collect(self, shares: Shares, *, partials: bool = True) -> None:
        # After this barrier all partial sums are in the file, so nothing is still on its way.
        self.transport.all_gather_bytes()

    def partial(self, place: Published) -> PartitionSums:
        return self._partials[place]

    def publish_parameters(self) -> None:
        # Owners update the only copy of the parameters, so just wait for all of them.
        self.transport.all_gather_bytes()

    def all_gather_gradient(self, whole: FlatTensors) -> None:
        # No other device reads the owner's partition of its first partial sum, and the owner has
        # finished folding, so this memory can carry the gradient; see the notes in
        # `onefold.exchange.reduction`.
        own = self._own[0].flat
        for chunk in self.summed[self._rank]:
            own.chunk(chunk).copy_(whole.chunk(chunk))
        # First barrier: all have written. Second barrier: all have read, and may write again.
        self.transport.all_gather_bytes()
        for owner, chunks in enumerate(self.summed):
            source = self._partials[Published(owner, 0)]
            for chunk in chunks if owner != self._rank else ():
                whole.chunk(chunk).copy_(source.chunk(chunk))
        self.transport.all_gather_bytes()

    def make_own(self) -> None:
        for memory in self._of_parameters:
            make_own(memory, self.allocator)
        # It is private now; a second call must do nothing.
        self._of_parameters = []


def _map_shared(
    mailbox: Mailbox, sizes: Sequence[int], allocator: TensorAllocator
) -> list[torch.Tensor]:
    """Map stretches of memory that all processes share, each (size,) uint8 of zeros.

    Untouched pages take no memory, so room for shares that never occur costs nothing.
    """
    # Each stretch starts on its own page, and is therefore aligned for any dtype.
    rounded = [-(-max(size, 1) // _PAGE_BYTES) * _PAGE_BYTES for size in sizes]
    starts = list(accumulate(rounded, initial=0))
    if mailbox.rank != 0:
        memory = take_file(mailbox, 0)
    else:
        with temporary_file(starts[-1], allocator) as (descriptor, memory):
            for rank in range(1, mailbox.size):
                mailbox.send_file(rank, descriptor)
    return [memory[a : a + size] for a, size in zip(starts[:-1], sizes, strict=True)]


class SharedStageExchange(StageExchange):
    """The stage exchange of one of several processes on a host.

    Args:
        memory: memory of this process.
    """

    def __init__(self, memory: SharedMemory) -> None:
        super().__init__(memory.storage, memory.assignment, memory.transport.mailbox.rank)
        self._transport, self._buffers = memory.transport, memory.send_buffers
        self._column = memory.assignment.shares.column_of(self.rank)
        """Devices that compute the same stages, including this one."""
        self._turn = 0

    def exchange(self, call: StageMessage) -> list[Delivery]:
        if isinstance(call, GradientSend):
            others = (rank for rank in self._column if rank != self.rank)
            leaving = [item for rank in others for item in self._own_segments(call, rank).items()]
            if leaving:
                targets = [self._in_buffer(self.rank, number) for number, _ in leaving]
                # Copy before the headers: they are the barrier after which owners read the buffer.
                copy_each(targets, [storage_order(segment) for _, segment in leaving])
        headers = self._all_gather_headers(self._transport, self._column, call)
        found = []
        for rank, header in headers.items():
            if rank == self.rank and isinstance(call, GradientSend):
                found.append(self._own_delivery(call))
                continue
            given = self._given(header)
            segments = {n: self._shaped(self._in_buffer(rank, n), n) for n in given}
            # Shared: the sender overwrites this memory in the event after the next one.
            found.append(Delivery(header, segments, shared=True))
        self._turn = 1 - self._turn
        return found

    def _in_buffer(self, rank: int, number: int) -> torch.Tensor:
        """Return the place of a segment in a device's buffer of this event: (numel,)."""
        return self.layout.in_room(number, self._buffers[rank][self._turn])


class SharedTransport(Transport):
    """Transport of one of several processes on this host.

    Args:
        mailbox: connects the processes; closed with this transport.
        allocator: allocates its `buffer`, and what it scatters.
        pipeline: number of devices in a pipeline.
    """

    def __init__(
        self, mailbox: Mailbox, allocator: TensorAllocator = DEFAULT_ALLOCATOR, pipeline: int = 1
    ) -> None:
        super().__init__(torch.device("cpu"), allocator)
        self.mailbox, self._pipeline = mailbox, pipeline
        self._descriptor = -1
        """Descriptor of the buffer's file; -1 if there is none."""

    def begin_step(self, step: int) -> None:
        self.step = self.mailbox.step = step

    def all_gather_bytes(self, message: bytes = b"", among: Ranks = None) -> Sequence[bytes]:
        return self.mailbox.all_gather_bytes(message, among)

    def buffer(self, nbytes: int) -> torch.Tensor:
        # A mapping does not grow with its file, so a larger buffer is a new file. The lead may
        # still have the old one mapped.
        if self._buffer is None or self._buffer.numel() < nbytes:
            self._drop_buffer()
            self._descriptor, self._buffer = new_file(nbytes, self.allocator)
        return self._buffer

    def gather_to_lead(self) -> list[torch.Tensor]:
        # Nothing is copied: the lead maps the memory that each process filled, and may read it as
        # long as it keeps the tensors. No process may refill its buffer until then:
        # `onefold.checkpoint.resume` packs a checkpoint only after the last one is written.
        memory, mailbox = self.buffer(0), self.mailbox
        if mailbox.rank != 0:
            mailbox.send_file(0, self._descriptor)
            return []
        return [memory, *(take_file(mailbox, peer) for peer in range(1, mailbox.size))]

    def scatter_from_lead(self, make: Callable[[int], torch.Tensor] | None) -> torch.Tensor:
        if make is None:
            return take_file(self.mailbox, 0)
        for peer in range(1, self.mailbox.size):
            made = make(peer)
            with temporary_file(made.numel(), self.allocator) as (descriptor, memory):
                # Write before sending, because the peer waits only for the file itself.
                memory[: made.numel()] = made
                self.mailbox.send_file(peer, descriptor)
        return make(0)

    def send(self, device: int, target: int, message: Message) -> None:
        head, nbytes = head_of(message)
        with temporary_file(nbytes) as (descriptor, memory):
            write_message(message, head, memory)
            self.mailbox.send_file(target, descriptor)

    def receive(self, device: int, source: int) -> Message:
        try:
            return read_message(take_file(self.mailbox, source))
        except PeerTimeout as error:
            beyond = source + (source - device)
            if beyond // self._pipeline != source // self._pipeline:
                raise
            # The source does not report its own wait, so name the device behind it.
            raise PeerTimeout(
                f"{error}. In a pipeline, device {source} may itself have waited for device "
                f"{beyond}",
                device=error.device,
                step=error.step,
            ) from None

    def close(self, failure: BaseException | None = None) -> None:
        # Send the reason first: after the sockets are closed, no peer can be reached.
        if failure is not None:
            self.mailbox.tell_failure(failure)
        else:
            self.mailbox.tell_end()
        self.mailbox.close()
        self._drop_buffer()

    def _drop_buffer(self) -> None:
        if self._buffer is not None:
            os.close(self._descriptor)
            self._buffer = None
