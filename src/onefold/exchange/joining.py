"""Joins the devices of a run: chooses memory and transport, and compares before it shares.

`LocalMemory` is the memory of a process that drives all devices.

Note: compare first
-------------------
Whatever follows takes for granted that all processes have the same sizes: shared memory is cut and
messages are matched by them. So the descriptions are compared before the first of either, by means
that depend on no size.

Note: why nothing waits in a process that drives all devices
-------------------------------------------------------------
One thread issues all work. Kernels and copies of a device run in the order of its stream, and
PyTorch makes a copy between two GPUs wait for both streams, and both for the copy. So the order of
the calls is the order of reads and writes, though the host never waits for it.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch

from onefold.core.assignment import Assignment, Devices
from onefold.core.flat import Chunk, FlatTensors
from onefold.core.fold import Published
from onefold.core.shard import Plan
from onefold.core.storage import Storage, cut_chunks
from onefold.exchange.collective import GroupTransport
from onefold.exchange.exchange import Exchange
from onefold.exchange.group import Rendezvous, agree_on_kind, agree_on_name, join_group
from onefold.exchange.mailbox import Mailbox, connected
from onefold.exchange.memory import AsGiven, FrozenMemory, Memory, Partial, Start, new_flats
from onefold.exchange.private import collective_exchange
from onefold.exchange.shardtable import ShardTable
from onefold.exchange.shared import HostTransport, shared_exchange
from onefold.exchange.stageexchange import LocalStageExchange
from onefold.exchange.transport import Alone, LocalPipelineChannel
from onefold.system.allocator import DEFAULT_ALLOCATOR, TensorAllocator

__all__ = ["has_memory_in_common", "join", "local_exchange"]


def join(
    storage: Storage,
    start: Start,
    assignment: Assignment,
    devices: Devices,
    *,
    description: bytes,
    compare: Callable[[Sequence[bytes]], None],
    timeout_s: float,
    allocator: TensorAllocator = DEFAULT_ALLOCATOR,
) -> Exchange:
    """Join the run with this process's devices.

    Args:
        storage: the sizes.
        start: this process's values, replaced by the lead's.
        assignment: who takes part.
        devices: which devices this process drives.
        description: what must be the same in every process, in bytes that can be compared.
        compare: raises if the descriptions of all processes differ.
        timeout_s: the longest wait for another device.
        allocator: where the model of this process lies, if its devices are the processor or keep
            nothing.

    Raises:
        DisagreementError: another device has another description, or is of another kind.
        PeerError: another device did not join, or failed while it did.
        ValueError: the exchange that was asked for cannot serve these devices.
    """
    if len(devices.own) == len(devices.all):
        return local_exchange(storage, start, assignment, allocator)
    kind, context = devices.all[devices.own[0]].type, devices.context
    meeting = Rendezvous(context, len(devices.all), timeout_s)
    shares = has_memory_in_common(devices)
    if (context.launcher == "torch" or not shares) and not context.network:
        # Under PyTorch's launcher each process has chosen its device by itself. Compared before the
        # branch below, or processes of two kinds would wait in two different exchanges.
        agree_on_kind(meeting, kind)
    if context.options.exchange == "shared" and not shares:
        raise ValueError(
            "the shared exchange is for CPU processes of one host; use --exchange collective"
        )
    transport: HostTransport | GroupTransport
    if shares:
        transport = HostTransport(_mailbox(devices, meeting), allocator)
    else:
        joined = join_group(meeting, kind, devices.trainer)
        device = assignment.devices[joined.group.rank()]
        transport = GroupTransport(device, joined, timeout_s, allocator)
    try:
        compare(transport.all_gather_objects({devices.own[0]: description}))
        if isinstance(transport, HostTransport):
            return shared_exchange(storage, start, transport, assignment)
        return collective_exchange(storage, start, transport, assignment)
    # Also for KeyboardInterrupt: the others must not wait for the limit.
    except BaseException as error:
        transport.close(error)
        raise


def has_memory_in_common(devices: Devices) -> bool:
    """Whether all devices of a run use the same memory."""
    if len(devices.own) == len(devices.all):
        return True
    can_share = devices.all[devices.own[0]].type == "cpu" and devices.context.one_host
    return can_share and devices.context.options.exchange != "collective"


def _mailbox(devices: Devices, meeting: Rendezvous) -> Mailbox:
    """Connections to the other processes of this host, for one Trainer."""
    context, rank, timeout_s = devices.context, devices.own[0], meeting.timeout_s
    if context.network:
        simulated: Mailbox = context.network.mailbox(devices.trainer)
        return simulated
    # Drawn at random by onefold's launcher and known to its workers alone. PyTorch's launcher has
    # an id that others can guess, so there the lead draws a name.
    is_drawn = context.launcher != "torch"
    drawn = context.run_id if is_drawn else agree_on_name(meeting, devices.trainer)
    address = f"{drawn}-{devices.trainer}"
    peers = connected(address, rank, meeting.size, timeout_s, meeting.has_ended)
    return Mailbox(peers, rank=rank, timeout_s=timeout_s)


def local_exchange(
    storage: Storage,
    start: Start,
    assignment: Assignment,
    allocator: TensorAllocator = DEFAULT_ALLOCATOR,
) -> Exchange:
    """Make the exchange of a process that drives all devices of the assignment."""
    memory = LocalMemory(storage, start, assignment.devices, allocator)
    transport = Alone(assignment.devices[0], allocator)
    stages = None
    if storage.stages is not None:
        stages = LocalStageExchange(storage, copies=allocator.on_disk)
    channel = LocalPipelineChannel() if assignment.plan.pipeline > 1 else None
    return Exchange(storage, memory, transport, assignment, stages, channel)


class LocalMemory(Memory):
    """All devices driven by one process, each with flat memory of its own.

    A single device uses gradients where backward left them.

    Args:
        storage: the sizes.
        start: the values of the lead's model.
        devices: all D of them.
        allocator: where the model lies, if the devices are the processor, or keep nothing.
    """

    def __init__(
        self,
        storage: Storage,
        start: Start,
        devices: Sequence[torch.device],
        allocator: TensorAllocator = DEFAULT_ALLOCATOR,
    ) -> None:
        self.allocator = allocator
        self._storage, self._devices = storage, devices
        numbered, first = dict(enumerate(devices)), devices[0]
        self.is_partitioned = allocator.apart and len(devices) == 1
        if self.is_partitioned:
            self.trained = {0: FlatTensors(storage.parameters, device=first, there=False)}
        else:
            self.trained = new_flats(storage.parameters, start.trained, numbered, allocator)
        self.other = new_flats(storage.other, start.other, numbered, allocator)
        if storage.frozen is not None:
            self.frozen = FrozenMemory(storage, storage.frozen, 0, first, allocator)
        self.table = ShardTable.private(storage, first)
        self._partials: dict[Published, Partial | AsGiven] = {}
        self._chunks: list[list[Chunk]] = []

    def bind(self, assignment: Assignment) -> None:
        storage = self._storage
        self._chunks = [
            cut_chunks(storage.parameters, storage.pieces_of(partition))
            for partition in assignment.partitions
        ]

    def broadcast_from_lead(self, buffers: FlatTensors) -> None:
        # Copies of the first device's model follow it at the next step. But what it keeps of frozen
        # parameters is not what it computes with.
        if self.frozen is not None:
            self.frozen.keep()

    def publish(self, device: int, slot: int, gradients: Sequence[torch.Tensor | None]) -> None:
        self.partial(Published(device, slot)).write(gradients)

    def collect(self, plan: Plan, *, partials: bool = True) -> None:
        pass  # all is here

    def partial(self, place: Published) -> Partial | AsGiven:
        """The memory of a partial sum, allocated when a plan first needs this slot."""
        if place not in self._partials:
            layout, device = self._storage.gradients, self._devices[place.device]
            is_alone = len(self._devices) == 1
            self._partials[place] = AsGiven(layout) if is_alone else Partial.private(layout, device)
        return self._partials[place]

    def home(self, device: int) -> FlatTensors | None:
        # The total may stay in anyone's partial sum where all devices are the processor, or parts
        # of one GPU; among several GPUs the owner needs it in memory of its own.
        if len(set(self._devices)) == 1:
            return None
        own = self.partial(Published(device, 0))
        return own.flat if isinstance(own, Partial) else None

    def publish_parameters(self) -> None:
        # Non-blocking: the next kernels of both devices come after the copy in their streams.
        for owner, chunks in enumerate(self._chunks):
            source = self.trained[owner]
            for receiver, parameters in self.trained.items():
                for chunk in chunks if receiver != owner else ():
                    parameters.chunk(chunk).copy_(source.chunk(chunk), non_blocking=True)

    def all_gather_gradient(self, whole: FlatTensors) -> None:
        pass  # one process has all partitions, so it is complete already

    def release(self) -> None:
        for partial in self._partials.values():
            partial.release()
