"""Carries the optimizer's state to the devices that own its pieces from the next step on."""

from __future__ import annotations

from collections.abc import Iterator

import torch

from onefold.core.roster import Roster
from onefold.engine.optimizerstate import PieceState, pack, packed, unpack
from onefold.engine.update import SpanOptimizer
from onefold.exchange.exchange import Exchange

__all__ = ["arriving_states"]


def arriving_states(
    before: Roster, after: Roster, update: SpanOptimizer, exchange: Exchange, *, leads: bool
) -> Iterator[PieceState]:
    """Return the states of the pieces that come to this process; called on all devices.

    They travel through the lead's process, which holds them for a moment.

    Args:
        before: who owns what now.
        after: who is to own it.
        update: the optimizer on this process's spans as they are now.
        exchange: with all devices.
        leads: whether this is the lead's process.
    """
    moving = {n for n in range(before.pieces) if before.owner_of(n) != after.owner_of(n)}
    transport, heap = exchange.transport, exchange.memory.heap
    with_others = len(exchange.memory.trained) < len(after.devices)
    pack([s for s in update.states(moving=True) if s.piece in moving], transport.room)
    brought = [state for memory in transport.bring() for state in unpack(memory)]

    def make(device: int) -> torch.Tensor:
        devices = {device} if with_others else set(range(len(after.devices)))
        return packed([s for s in brought if after.owner_of(s.piece) in devices], heap)

    return unpack(transport.hand_out(make if leads else None))
