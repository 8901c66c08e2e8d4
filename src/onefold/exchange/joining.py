"""Joins the devices of a run: chooses memory and transport, and compares before it shares.

`OneDeviceMemory` and `DevicesMemory` are the memory of a process that drives all devices.

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

from onefold.core.flat import Chunk, FlatTensors, Layout
from onefold.core.fold import Published
from onefold.core.roster import Roster, Team
from onefold.core.shard import Plan
from onefold.core.storage import Storage, cut_chunks
from onefold.exchange.board import Board
from onefold.exchange.carrier import AtOnce
from onefold.exchange.collective import GroupTransport
from onefold.exchange.exchange import Exchange
from onefold.exchange.group import (
    agree_on_kind,
    agree_on_name,
    join_group,
    watch_for_end,
)
from onefold.exchange.mailbox import Mailbox, connected
from onefold.exchange.memory import (
    Arrivals,
    FirstValues,
    FrozenMemory,
    Memory,
    Start,
    new_flat,
    write_first,
)
from onefold.exchange.private import collective_exchange
from onefold.exchange.relay import LocalRelay
from onefold.exchange.shared import shared_exchange
from onefold.exchange.spans import AsGiven, Partial, Spanned
from onefold.exchange.transport import Alone
from onefold.system.heap import ORDINARY, Heap

__all__ = ["has_memory_in_common", "join"]


Compare = Callable[[Sequence[bytes]], None]


def join(
    storage: Storage,
    start: Start,
    roster: Roster,
    team: Team,
    *,
    description: bytes,
    compare: Compare,
    timeout_s: float,
    heap: Heap = ORDINARY,
) -> Exchange:
    """Join the run with this process's devices.

    Args:
        storage: the sizes.
        start: this process's values, replaced by the lead's.
        roster: who takes part.
        team: which devices this process drives.
        description: what must be the same in every process, in bytes that can be compared.
        compare: raises if the descriptions of all processes differ.
        timeout_s: the longest wait for another device.
        heap: where the model of this process lies, if its devices are the processor or keep
            nothing.

    Raises:
        DisagreementError: another device has another description, or is of another kind.
        PeerError: another device did not join, or failed while it did.
        ValueError: the exchange that was asked for cannot serve these devices.
    """
    if len(team.own) == len(team.devices):
        return local_exchange(storage, start, roster, heap)
    kind, world, size = team.devices[team.own[0]].type, team.world, len(team.devices)
    shares = has_memory_in_common(team)
    if (world.launcher == "torch" or not shares) and not world.network:
        # Under PyTorch's launcher each process has chosen its device by itself. Compared before the
        # branch below, or processes of two kinds would wait in two different exchanges.
        agree_on_kind(world, kind, size, timeout_s)
    if world.options.exchange == "shared" and not shares:
        raise ValueError(
            "the shared exchange is for CPU processes of one host; use --exchange collective"
        )
    if shares:
        mailbox = _mailbox(team, timeout_s)
        try:
            _compare_on_host(mailbox, description, compare)
            return shared_exchange(storage, start, mailbox, roster, heap)
        # Also for KeyboardInterrupt: the others must not wait for the limit.
        except BaseException as error:
            mailbox.tell_failure(error)
            mailbox.close()
            raise
    joined = join_group(world, kind, size, timeout_s=timeout_s, trainer=team.trainer)
    transport = GroupTransport(roster.devices[joined.group.rank()], joined, timeout_s, heap)
    try:
        compare(transport.gather_bytes({transport.rank: description}))
        return collective_exchange(storage, start, transport, roster, heap)
    except BaseException as error:
        transport.close(error)
        raise


def has_memory_in_common(team: Team) -> bool:
    """Whether all devices of a run use the same memory."""
    if len(team.own) == len(team.devices):
        return True
    can_share = team.devices[team.own[0]].type == "cpu" and team.world.one_host
    return can_share and team.world.options.exchange != "collective"


def _mailbox(team: Team, timeout_s: float) -> Mailbox:
    """Connections to the other processes of this host, for one Trainer."""
    world, size = team.world, len(team.devices)
    if world.network:
        simulated: Mailbox = world.network.mailbox(team.trainer)
        return simulated
    # Drawn at random by onefold's launcher and known to its workers alone. PyTorch's launcher has
    # an id that others can guess, so there the lead draws a name.
    drawn = world.run_id
    if world.launcher == "torch":
        drawn = agree_on_name(world, size, timeout_s, team.trainer)
    address, rank = f"{drawn}-{team.trainer}", team.own[0]
    peers = connected(address, rank, size, timeout_s, watch_for_end(world, size, timeout_s))
    return Mailbox(peers, rank=rank, timeout_s=timeout_s)


def _compare_on_host(mailbox: Mailbox, description: bytes, compare: Compare) -> None:
    # The lead compares for all; its error reaches them through `tell_failure`.
    if mailbox.rank != 0:
        mailbox.send_note(0, description)
        return
    compare([description, *(mailbox.receive_note(rank) for rank in range(1, mailbox.size))])


def local_exchange(
    storage: Storage, start: Start, roster: Roster, heap: Heap = ORDINARY
) -> Exchange:
    """Make the exchange of a process that drives all devices of the roster."""
    first = roster.devices[0]
    memory: Memory = (
        OneDeviceMemory(storage, start, first, heap)
        if len(roster.devices) == 1
        else DevicesMemory(storage, start, roster.devices, heap)
    )
    carrier = None if storage.stages is None else AtOnce(storage, lends=heap.on_disk)
    relay = LocalRelay() if roster.plan.line > 1 else None
    return Exchange(storage, memory, Alone(first, heap), roster, carrier, relay)


class OneDeviceMemory(Memory):
    """One device: the gradients are used where backward left them.

    Args:
        storage: the sizes.
        start: the values of the model.
        device: which one.
        heap: where the model lies, if the device is the processor, or keeps nothing.
    """

    def __init__(
        self, storage: Storage, start: Start, device: torch.device, heap: Heap = ORDINARY
    ) -> None:
        self.heap = heap
        self.is_lent = heap.apart
        if self.is_lent:
            self.trained = {0: FlatTensors(storage.parameters, device=device, there=False)}
        else:
            self.trained = _own_flats(storage.parameters, start.trained, [device], heap)
        self.other = _own_flats(storage.other, start.other, [device], heap)
        if storage.frozen is not None:
            self.frozen = FrozenMemory(storage, storage.frozen, 0, device, heap)
        self.board = Board.private(storage.board, device)
        self._given = AsGiven(storage.gradients)

    def bind(self, roster: Roster) -> None:
        pass  # the device owns every span

    def follow_lead(self, buffers: FlatTensors) -> None:
        # It is the lead; but what it keeps of frozen parameters is not what it computes with.
        if self.frozen is not None and self.frozen.flat.is_there:
            self.frozen.keep()

    def adopt_lead(self, values: torch.Tensor) -> None:
        pass  # it is the lead

    def publish(self, device: int, slot: int, gradients: Sequence[torch.Tensor | None]) -> None:
        self._given.gradients = gradients

    def collect(self, plan: Plan) -> Arrivals | None:
        return None

    def collect_board(self, plan: Plan) -> None:
        pass  # there is one board

    def partial(self, place: Published) -> Spanned:
        return self._given

    def hand_on(self) -> None:
        pass  # the device owns every span

    def share_gradient(self, whole: FlatTensors) -> None:
        pass  # one process has all spans, so it is complete already

    def release(self) -> None:
        self._given.gradients = ()


class DevicesMemory(Memory):
    """Several devices driven by one process, each with flat memory of its own.

    Args:
        storage: the sizes.
        start: the values of the lead's model.
        devices: all D of them.
        heap: where the model lies, if the devices are the processor.
    """

    def __init__(
        self,
        storage: Storage,
        start: Start,
        devices: Sequence[torch.device],
        heap: Heap = ORDINARY,
    ) -> None:
        self.heap = heap
        self.trained = _own_flats(storage.parameters, start.trained, devices, heap)
        self.other = _own_flats(storage.other, start.other, devices, heap)
        self.board = Board.private(storage.board, devices[0])
        self._storage = storage
        self._devices = devices
        self._partials: dict[Published, Partial] = {}
        self._chunks: dict[int, list[Chunk]] = {}

    def bind(self, roster: Roster) -> None:
        self._chunks = {
            owner: cut_chunks(self._storage.parameters, self._storage.pieces_of(span))
            for owner, span in enumerate(roster.spans)
        }

    def follow_lead(self, buffers: FlatTensors) -> None:
        pass  # copies of the first device's model follow it at the next step

    def adopt_lead(self, values: torch.Tensor) -> None:
        pass  # one process has all of the lead's values

    def publish(self, device: int, slot: int, gradients: Sequence[torch.Tensor | None]) -> None:
        self.partial(Published(device, slot)).write(gradients)

    def collect(self, plan: Plan) -> Arrivals | None:
        return None

    def collect_board(self, plan: Plan) -> None:
        pass  # there is one board

    def partial(self, place: Published) -> Partial:
        """The memory of a partial sum, allocated when a plan first needs this slot."""
        if place not in self._partials:
            device = self._devices[place.device]
            self._partials[place] = Partial.private(self._storage.gradients, device)
        return self._partials[place]

    def home(self, device: int) -> FlatTensors | None:
        # The total may stay in anyone's partial sum where all devices are the processor, or parts
        # of one GPU; among several GPUs the owner needs it in memory of its own.
        one_memory = len(set(self._devices)) == 1
        return None if one_memory else self.partial(Published(device, 0)).flat

    def hand_on(self) -> None:
        # Non-blocking: the next kernels of both devices come after the copy in their streams.
        for owner, chunks in self._chunks.items():
            source = self.trained[owner]
            for receiver, parameters in self.trained.items():
                for chunk in chunks if receiver != owner else ():
                    parameters.chunk(chunk).copy_(source.chunk(chunk), non_blocking=True)

    def share_gradient(self, whole: FlatTensors) -> None:
        pass  # one process has all spans, so it is complete already

    def release(self) -> None:
        for partial in self._partials.values():
            partial.release()


def _own_flats(
    layout: Layout,
    values: Sequence[torch.Tensor | FirstValues],
    devices: Sequence[torch.device],
    heap: Heap,
) -> dict[int, FlatTensors]:
    """Flat memory of each device, with the first values of the parameters in it."""
    flats = {number: new_flat(layout, device, heap) for number, device in enumerate(devices)}
    first, *rest = flats.values()
    write_first(first, values)
    for flat in rest:
        for section, source in zip(flat.sections, first.sections, strict=True):
            section.copy_(source)
    return flats
