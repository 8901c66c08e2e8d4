"""Gives each device its parts of the first values, where none has all of them."""

from __future__ import annotations

import torch

from onefold.core.flat import Layout, laid_out, storage_order
from onefold.core.recipe import short_lived
from onefold.engine.update import SpanOptimizer
from onefold.exchange.exchange import Exchange
from onefold.exchange.memory import FirstValues, Start

__all__ = ["hand_out_entries", "values_of_entry"]


def hand_out_entries(
    start: Start, update: SpanOptimizer, exchange: Exchange, *, leads: bool
) -> None:
    """Bring the lead's values to the owners of their pieces; called on all devices.

    One parameter goes to all devices at a time, so none has more than its own parts and that one.

    Args:
        start: this process's values, of which the lead's count.
        update: has the pieces of the trained parameters.
        exchange: with all devices.
        leads: whether this is the lead's process.
    """
    memory, masters = exchange.memory, update.storage.masters
    for number, value in enumerate(start.trained):
        values = _shared(value, masters, number, exchange, leads=leads)
        for item in update.owned:
            if item.piece.entry == number:
                part = values[item.piece.start : item.piece.stop]
                storage_order(item.values.data).copy_(part)
    for number, value in enumerate(start.frozen):
        assert memory.frozen is not None
        layout = memory.frozen.flat.layout
        memory.frozen.adopt_entry(number, _shared(value, layout, number, exchange, leads=leads))


def values_of_entry(value: torch.Tensor | FirstValues, layout: Layout, number: int) -> torch.Tensor:
    """(numel,) first values of a parameter, in the storage order that it has in a layout."""
    entry = layout.entries[number]
    if isinstance(value, torch.Tensor):
        return storage_order(laid_out(value, entry.stride))
    values = _room(layout, number, torch.device("cpu"))
    value.write_to(values.as_strided(entry.shape, entry.stride))
    return values


def _shared(
    value: torch.Tensor | FirstValues,
    layout: Layout,
    number: int,
    exchange: Exchange,
    *,
    leads: bool,
) -> torch.Tensor:
    """(numel,) the lead's values of a parameter."""
    device = next(iter(exchange.memory.trained.values())).device
    if leads:
        values = values_of_entry(value, layout, number).to(device)
    else:
        values = _room(layout, number, device)
    exchange.memory.adopt_lead(values)
    return values


def _room(layout: Layout, number: int, device: torch.device) -> torch.Tensor:
    """(numel,) for the values of a parameter."""
    dtype, numel = layout.dtype_of(number), layout.entries[number].numel
    if device.type == "cpu":
        return short_lived(numel * dtype.itemsize).view(dtype)
    return torch.empty(numel, dtype=dtype, device=device)
