"""Joins the other processes of a run, and chooses transport and memory."""

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
    """Connect this process to the others. Arguments and errors are those of `join`.

    Args:
        in_common: whether all devices use the same memory.
    """
    kind, context = devices.all[devices.own[0]].type, devices.context
    meeting = Rendezvous(context, len(devices.all), timeout_s)
    if (context.launcher == "torch" or not in_common) and not context.network:
        # Under PyTorch's launcher each process chooses its device. Compare the devices before the
        # branch below, or processes with two types of device would wait in two different exchanges.
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
    """Return the card that this process drives, with its machine; empty for a CPU."""
    card = accelerator.card_of(devices.all[devices.own[0]])
    return card and f"{card} of {host_identity()}"


def _mailbox(devices: Devices, meeting: Rendezvous) -> Mailbox:
    """Connect to the other processes of this host, for one Trainer."""
    context, rank, timeout_s = devices.context, devices.own[0], meeting.timeout_s
    if context.network:
        simulated: Mailbox = context.network.mailbox(devices.trainer)
        return simulated
    # onefold's launcher draws the run id at random, and only its workers know it. Other processes
    # can guess the run id of PyTorch's launcher, so there the lead draws a name.
    is_drawn = context.launcher != "torch"
    drawn = context.run_id if is_drawn else agree_on_name(meeting, devices.trainer)
    address = f"{drawn}-{devices.trainer}"
    peers = connected(address, rank, meeting.size, timeout_s, meeting.has_ended)
    mailbox = Mailbox(peers, rank=rank, timeout_s=timeout_s)
    mailbox.note_wait = _noting_waits(devices)
    return mailbox


def _noting_waits(devices: Devices) -> NoteWait:
    """Return a function that notes waits in this process's table, if it has one."""
    progress, roster = places_of(devices.context), devices.roster
    if progress is None:
        return lambda peer: None
    # -1 stands for any peer. The table uses seats, which stay the same when the group changes.
    seats: dict[int | None, int | None] = {-1: -1, None: None, **dict(enumerate(roster.seats))}
    return lambda peer: progress.set_waiting(devices.seats[0], seats[peer])


def memory_with_others(
    transport: Transport, storage: Storage, start: Start, assignment: Assignment
) -> tuple[Memory, StageExchange | None]:
    """Make the memory for a transport to other processes, and the stage exchange if needed."""
    has_stages = storage.stages is not None
    if isinstance(transport, SharedTransport):
        common = SharedMemory(storage, start, transport, assignment)
        # In a single pipeline each device owns the stages that it computes, so nothing is sent.
        if has_stages and len(assignment.shares.column_of(transport.mailbox.rank)) == 1:
            return common, LocalStageExchange(storage, assignment)
        return common, SharedStageExchange(common) if has_stages else None
    collective = load("exchange.collective_memory")
    private = collective.CollectiveMemory(storage, start, transport, assignment)
    return private, collective.CollectiveStageExchange(private) if has_stages else None
