"""Has pieces that are kept in other memory visit the device that computes with them.

Note: what is computed where
----------------------------
Where a device keeps nothing, sums of gradients are added up in the memory of the host: an addition
of two numbers has the same bits everywhere. All else is computed on the device, one piece or one
stage at a time, as processors and GPUs order the additions of a norm differently, and round a
product that is added at once in another place.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch

from onefold.system.heap import Heap

__all__ = ["change_at", "updating_at"]


class _Visitor(NamedTuple):
    """A piece that is on a device for a while."""

    values: torch.Tensor
    """What the optimizer knows the piece by."""
    stays: torch.Tensor
    """Where its values are kept."""
    state: dict[str, torch.Tensor]
    """Where what came along of its state is kept, by key."""


def change_at(
    device: torch.device,
    tensors: Iterable[torch.Tensor],
    change: Callable[[list[torch.Tensor]], None],
) -> None:
    """Change tensors that are kept elsewhere on a device, one after the other.

    Args:
        device: where.
        tensors: on the host; overwritten.
        change: writes to tensors that are on the device.
    """
    for tensor in tensors:
        there = tensor.to(device, copy=True)
        change([there])
        tensor.copy_(there)


@contextmanager
def updating_at(
    device: torch.device,
    optimizer: torch.optim.Optimizer,
    divided: Sequence[Sequence[torch.Tensor]],
    heap: Heap,
) -> Iterator[None]:
    """Have pieces and their state on a device inside this context, and keep what becomes of them.

    Args:
        device: where.
        optimizer: whose state it is.
        divided: for each group of the optimizer, the values of those of its pieces that are wanted.
        heap: where they are kept otherwise.
    """
    visitors = []
    for group, pieces in zip(optimizer.param_groups, divided, strict=True):
        # A count of steps is read on the host, but by kernels that want it on the device.
        counts = bool(group.get("capturable") or group.get("fused"))
        visitors += [_come(values, device, optimizer, counts=counts) for values in pieces]
    try:
        yield
    finally:
        for visitor in visitors:
            _leave(visitor, optimizer, heap)


def _come(
    values: torch.Tensor, device: torch.device, optimizer: torch.optim.Optimizer, *, counts: bool
) -> _Visitor:
    stays: torch.Tensor = values.data
    state: dict[str, Any] = optimizer.state.get(values, {})
    along = {
        key: value
        for key, value in state.items()
        if isinstance(value, torch.Tensor) and (key != "step" or counts)
    }
    # Through .data, as the optimizer finds the state by this very object.
    values.data = stays.to(device, copy=True)
    state.update({key: value.to(device, copy=True) for key, value in along.items()})
    return _Visitor(values, stays, along)


def _leave(visitor: _Visitor, optimizer: torch.optim.Optimizer, heap: Heap) -> None:
    values, stays, along = visitor
    values.grad = None
    stays.copy_(values.data)
    values.data = stays
    state: dict[str, Any] = optimizer.state.get(values, {})
    for key, value in state.items():
        if not isinstance(value, torch.Tensor):
            continue
        before = along.get(key)
        if before is not None and _are_alike(before, value):
            state[key] = before.copy_(value)
        else:
            state[key] = heap.kept(value)


def _are_alike(one: torch.Tensor, other: torch.Tensor) -> bool:
    same = one.shape == other.shape and one.stride() == other.stride()
    return same and one.dtype == other.dtype
