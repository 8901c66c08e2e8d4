"""Joins the other processes of a run: chooses transport and memory; see `joining`."""

from __future__ import annotations

from typing import TYPE_CHECKING

from onefold.core.assignment import Assignment, Devices
from onefold.core.late import load
from onefold.core.storage import Storage
from onefold.exchange.connections import host_identity
from onefold.exchange.group import Rendezvous, agree_on_devices, agree_on_name, join_group
from onefold.exchange.mailbox import Mailbox, connected
from onefold.exchange.memory import Memory, Start
from onefold.exchange.progress import NoteWait, places_of
from onefold.exchange.reduction import LocalStageExchange, StageExchange
from onefold.exchange.shared import SharedMemory, SharedStageExchange, SharedTransport
from onefold.exchange.transport import Transport
from onefold.system import accelerator
from onefold.system.allocator import TensorAllocator

if TYPE_CHECKING:
    from onefold.exchange.collective import CollectiveTransport

__all__ = ["join_others", "memory_with_others"]


def join_others(
    assignment: Assignment,
    devices: Devices,
    timeout_s: float,
    allocator: TensorAllocator,
    *,
    in_common: bool,
) -> SharedTransport | CollectiveTransport:
    """Connect this process to the others; arguments and errors are those of `join`.

    ``in_common`` says whether all devices use the same memory.
    """
    kind, context = devices.all[devices.own[0]].type, devices.context
    meeting = Rendezvous(context, len(devices.all), timeout_s)
    if (context.launcher == "torch" or not in_common) and not context.network:
        # Under PyTorch's launcher each process has chosen its device by itself. Compared before the
        # branch below, or processes of two kinds would wait in two different exchanges.
        agree_on_devices(meeting, kind, _card_of(devices))
    if context.options.exchange == "shared" and not in_common:
        raise ValueError(
            "the shared exchange is for CPU processes of one host; use --exchange collective"
        )
    if in_common:
        return SharedTransport(_mailbox(devices, meeting), allocator, assignment.shares.pipeline)
    joined = join_group(meeting, kind, devices.trainer)
    device = assignment.devices[joined.group.rank()]
    made: CollectiveTransport = load("exchange.collective").CollectiveTransport(
        device, joined, timeout_s, allocator, _noting_waits(devices)
    )
    return made


def _card_of(devices: Devices) -> str:
    """The card that this process drives, on whichever machine it is; empty for a processor."""
    card = accelerator.card_of(devices.all[devices.own[0]])
    return card and f"{card} of {host_identity()}"


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
    mailbox = Mailbox(peers, rank=rank, timeout_s=timeout_s)
    mailbox.note_wait = _noting_waits(devices)
    return mailbox


def _noting_waits(devices: Devices) -> NoteWait:
    """Notes waits in the table of this process, if it has one: by seats, as the table has them."""
    progress, roster = places_of(devices.context), devices.roster
    if progress is None:
        return lambda peer: None
    # A peer of -1 is any of them.
    seats: dict[int | None, int | None] = {-1: -1, None: None, **dict(enumerate(roster.seats))}
    return lambda peer: progress.set_waiting(devices.seats[0], seats[peer])


def memory_with_others(
    transport: Transport, storage: Storage, start: Start, assignment: Assignment
) -> tuple[Memory, StageExchange | None]:
    """The memory that goes with a transport to others, and what brings stages to their owners."""
    has_stages = storage.stages is not None
    if isinstance(transport, SharedTransport):
        common = SharedMemory(storage, start, transport, assignment)
        # In one pipeline each device owns the stages that it computes: their gradients go nowhere.
        if has_stages and len(assignment.shares.column_of(transport.mailbox.rank)) == 1:
            return common, LocalStageExchange(storage, assignment)
        return common, SharedStageExchange(common) if has_stages else None
    collective = load("exchange.collective_memory")
    private = collective.CollectiveMemory(storage, start, transport, assignment)
    return private, collective.CollectiveStageExchange(private) if has_stages else None
