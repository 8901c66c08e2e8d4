"""Joins the devices of a run: chooses memory and transport, and compares before it shares.

Note: compare first
-------------------
Whatever follows takes for granted that all processes have the same sizes: shared memory is cut and
messages are matched by them. So the descriptions are compared before the first of either, by means
that depend on no size.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from onefold.core.roster import Roster
from onefold.core.storage import Storage
from onefold.core.team import Team
from onefold.exchange.exchange import Exchange
from onefold.exchange.group import (
    agree_on_kind,
    agree_on_name,
    gather_bytes,
    join_group,
    watch_for_end,
)
from onefold.exchange.local import local_exchange
from onefold.exchange.mailbox import Mailbox
from onefold.exchange.memory import Start
from onefold.exchange.private import collective_exchange
from onefold.exchange.shared import shared_exchange
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
    if world.launcher == "torch" or not shares:
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
    try:
        compare(gather_bytes(joined.group, description))
        return collective_exchange(storage, start, joined, roster, timeout_s, heap)
    except BaseException:
        joined.watch.close()
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
    # Drawn at random by onefold's launcher and known to its workers alone. PyTorch's launcher has
    # an id that others can guess, so there the lead draws a name.
    drawn = world.run_id
    if world.launcher == "torch":
        drawn = agree_on_name(world, size, timeout_s, team.trainer)
    return Mailbox(
        f"{drawn}-{team.trainer}",
        rank=team.own[0],
        size=size,
        timeout_s=timeout_s,
        ended=watch_for_end(world, size, timeout_s),
    )


def _compare_on_host(mailbox: Mailbox, description: bytes, compare: Compare) -> None:
    # The lead compares for all; its error reaches them through `tell_failure`.
    if mailbox.rank != 0:
        mailbox.send_note(0, description)
        return
    compare([description, *(mailbox.receive_note(rank) for rank in range(1, mailbox.size))])
