"""Distribution of the lead's initial values to owners whose models lack them, or round them."""

from __future__ import annotations

from functools import lru_cache
from itertools import chain

import torch

from onefold.core.assignment import Assignment, Devices
from onefold.core.flat import Layout, laid_out, storage_order
from onefold.deferred.values import short_lived
from onefold.exchange.exchange import Exchange
from onefold.exchange.memory import FirstValues, Start
from onefold.update.optimizer import MASTER, PartitionedOptimizer
from onefold.update.staging import SegmentState
from onefold.update.state import packed, unpack

__all__ = ["distribute_entries", "distribute_masters", "values_of_entry"]


def distribute_masters(
    start: Start,
    update: PartitionedOptimizer,
    exchange: Exchange,
    assignment: Assignment,
    devices: Devices,
) -> None:
    """Send the exact values of segments to owners whose models hold rounded ones.

    Called on all devices.

    Args:
        start: this process's values; only the lead's are used.
        update: the optimizer, with the segments of the trained parameters.
        exchange: exchange with all devices.
        assignment: assignment of segments to owners.
        devices: all devices.
    """
    storage, trained = update.storage, start.trained

    @lru_cache(maxsize=1)  # segments of a parameter are consecutive
    def drawn(entry: int) -> torch.Tensor:
        return values_of_entry(trained[entry], storage.masters, entry)

    def make(device: int) -> torch.Tensor:
        numbers = devices.own if device in devices.own else (device,)
        states = []
        for number in chain.from_iterable(assignment.partitions[each] for each in numbers):
            segment = storage.segments[number]
            values = drawn(segment.entry)[segment.start : segment.stop]
            states.append(SegmentState(number, MASTER, values, True))
        return packed(states, exchange.memory.allocator)

    made = make if devices.has_lead else None
    update.adopt_states(unpack(exchange.transport.scatter_from_lead(made)))


def distribute_entries(
    start: Start, update: PartitionedOptimizer, exchange: Exchange, *, leads: bool
) -> None:
    """Send the lead's values to the owners of their segments; called on all devices.

    Each parameter is broadcast separately, so a device never holds more than its own parts and one
    parameter.

    Args:
        start: this process's values; only the lead's are used.
        update: the optimizer, with the segments of the trained parameters.
        exchange: exchange with all devices.
        leads: whether this is the lead's process.
    """
    memory, masters = exchange.memory, update.storage.masters
    device = next(iter(memory.trained.values())).device

    def shared(value: torch.Tensor | FirstValues, layout: Layout, number: int) -> torch.Tensor:
        """Return the lead's values of a parameter: (numel,)."""
        own = values_of_entry(value, layout, number).to(device) if leads else None
        values = _room(layout, number, device) if own is None else own
        memory.broadcast_tensor_from_lead(values)
        return values

    for number, value in enumerate(start.trained):
        values = shared(value, masters, number)
        for item in update.owned:
            if item.segment.entry == number:
                part = values[item.segment.start : item.segment.stop]
                storage_order(item.values.data).copy_(part)
    for number, value in enumerate(start.frozen):
        assert memory.frozen is not None
        memory.frozen.adopt_entry(number, shared(value, memory.frozen.flat.layout, number))


def values_of_entry(value: torch.Tensor | FirstValues, layout: Layout, number: int) -> torch.Tensor:
    """Return the first values of a parameter, in the storage order of its layout: (numel,)."""
    entry = layout.entries[number]
    if isinstance(value, torch.Tensor):
        return storage_order(laid_out(value, entry.stride))
    values = _room(layout, number, torch.device("cpu"))
    value.write_to(values.as_strided(entry.shape, entry.stride))
    return values


def _room(layout: Layout, number: int, device: torch.device) -> torch.Tensor:
    """Allocate memory for the values of a parameter: (numel,)."""
    dtype, numel = layout.dtype_of(number), layout.entries[number].numel
    if device.type == "cpu":
        return short_lived(numel * dtype.itemsize).view(dtype)
    return torch.empty(numel, dtype=dtype, device=device)
