"""The segments that this process updates, and their way to the device that computes with them.

`OwnedSegment` is a segment of the model that a device of this process updates, `SegmentState` one
value of its optimizer state. `Staging` moves segments that are stored in other memory to the device
while they are updated.

Note: what is computed where
----------------------------
If parameters are kept apart from a device, gradients are summed in host memory: a sum of two
numbers has the same bits everywhere, and so has a product with one number that the host knows. (A
script that flushes denormal numbers on the host changes its bits.) Everything else is computed on
the device, one segment or one stage at a time, because CPUs and GPUs order the additions of a norm
differently, and fuse multiply and add in different places.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple

import torch

from onefold.core.flat import FlatTensors, Segment
from onefold.system.allocator import TensorAllocator

__all__ = ["DeviceStaging", "OwnedSegment", "SegmentState", "Staging", "is_by_element"]


Divided = Callable[[], Sequence[Collection[torch.Tensor]]]
Change = Callable[[Sequence[torch.Tensor], Sequence[torch.Tensor]], None]


class Staging:
    """Keeps segments and their state where they are updated, in an allocator's memory.

    Args:
        device: the device that computes.
        allocator: allocates the memory of segments and state.
        optimizer: the optimizer of the segments.
    """

    moves = False
    """Whether segments are stored in other memory than the memory of the device."""

    def __init__(
        self, device: torch.device, allocator: TensorAllocator, optimizer: torch.optim.Optimizer
    ) -> None:
        self._device, self._allocator, self._optimizer = device, allocator, optimizer
        self._came: dict[torch.Tensor, frozenset[str]] = {}
        """Keys of state that the optimizer had on the device, for each segment that was updated."""

    def new(self, shape: Sequence[int], stride: Sequence[int], dtype: torch.dtype) -> torch.Tensor:
        """Return an uninitialized tensor in the memory of segments."""
        return torch.empty_strided(shape, stride, dtype=dtype, device=self._device)

    def change(
        self, change: Change, tensors: Sequence[torch.Tensor], by: Sequence[torch.Tensor] = ()
    ) -> None:
        """Change stored tensors, on the device that computes.

        Args:
            change: gets tensors to write to and others to read, both on the device.
            tensors: the tensors to overwrite.
            by: one tensor for each of them; or none.
        """
        change(tensors, by)

    def updating(self, divided: Divided) -> AbstractContextManager[None]:
        """Keep segments on the device inside this context, and store their results at its end.

        Args:
            divided: returns the values of the segments to move, for each group of the optimizer.
        """
        return nullcontext()


class DeviceStaging(Staging):
    """Moves segments and their state to a device while they are updated."""

    moves = True

    def new(self, shape: Sequence[int], stride: Sequence[int], dtype: torch.dtype) -> torch.Tensor:
        flat = self._allocator.empty(math.prod(shape) * dtype.itemsize).view(dtype)
        return flat.as_strided(shape, stride)

    def change(
        self, change: Change, tensors: Sequence[torch.Tensor], by: Sequence[torch.Tensor] = ()
    ) -> None:
        for place, tensor in enumerate(tensors):
            # Move one at a time, because the device has no room for all.
            there = tensor.to(self._device, copy=True)
            change([there], [each.to(self._device) for each in by[place : place + 1]])
            tensor.copy_(there)

    @contextmanager
    def updating(self, divided: Divided) -> Iterator[None]:
        # Every segment must leave, even if another one fails to leave or to arrive.
        with ExitStack() as leaving:
            for group, segments in zip(self._optimizer.param_groups, divided(), strict=True):
                # Matters for a state that was just loaded: step counts are read on the host, except
                # by kernels that need them on the device.
                counts = bool(group.get("capturable") or group.get("fused"))
                for values in segments:
                    self._come(values, leaving, counts=counts)
            yield

    def _come(self, values: torch.Tensor, leaving: ExitStack, *, counts: bool) -> None:
        stays: torch.Tensor = values.data
        state: dict[str, Any] = self._optimizer.state.get(values, {})
        known = self._came.get(values)
        along = {
            key: value
            for key, value in state.items()
            if isinstance(value, torch.Tensor)
            and (key in known if known is not None else key != "step" or counts)
        }
        # Before anything moves, so that a failure on the way is undone as well.
        leaving.callback(partial(self._leave, values, stays, along))
        # Assign .data, because the optimizer finds the state by this object.
        values.data = stays.to(self._device, copy=True)
        for key, value in along.items():
            state[key] = value.to(self._device, copy=True)

    def _leave(
        self, values: torch.Tensor, stays: torch.Tensor, along: dict[str, torch.Tensor]
    ) -> None:
        # The gradient is on the device too, and is not needed any more.
        values.grad = None
        if values.data_ptr() != stays.data_ptr():
            stays.copy_(values.data)
            values.data = stays
        state: dict[str, Any] = self._optimizer.state.get(values, {})
        tensors = {key: value for key, value in state.items() if isinstance(value, torch.Tensor)}
        self._came[values] = frozenset(
            key for key, value in tensors.items() if value.device == self._device
        )
        for key, value in tensors.items():
            before = along.get(key)
            # Reuse the old memory if the value still fits; otherwise store it anew.
            if before is not None and _are_alike(before, value):
                state[key] = before.copy_(value)
            else:
                state[key] = self._allocator.kept(value)


def _are_alike(one: torch.Tensor, other: torch.Tensor) -> bool:
    same = one.shape == other.shape and one.stride() == other.stride()
    return same and one.dtype == other.dtype


@dataclass(frozen=True, slots=True)
class OwnedSegment:
    """A segment that a device of this process updates."""

    number: int
    """The segment's number among all segments of the model."""
    device: int
    """Number of the device that updates it."""
    segment: Segment
    """The elements of a parameter that it covers."""
    parameter: torch.nn.Parameter
    """The user's parameter that it is cut from; identifies its group and earlier state."""
    values: torch.Tensor
    """The segment's values on its device, which the optimizer updates in place: (numel,), or in the
    parameter's shape if the segment is whole. Models compute with these values, unless they hold
    parameters in a lower precision, or only for a while."""
    home: FlatTensors | None = None
    """The device's memory of parameters, where models then see the values, rounded or not."""

    @property
    def shown(self) -> torch.Tensor | None:
        """View of the values as models see them, if it is separate; its memory must exist."""
        return None if self.home is None else self.home.segment(self.segment)


def is_by_element(
    key: str, value: object, shape: Sequence[int], stride: Sequence[int] | None = None
) -> bool:
    """Whether a value of an optimizer's state has one number for each element of its parameter.

    A step count does not, even if the parameter is a single number too.

    Args:
        key: the optimizer's name of the value.
        value: any value of a state.
        shape: the shape of the parameter.
        stride: the strides of the parameter, if it is never cut. A value with other strides then
            stays as it is: it may be a matrix to multiply with, whose bits depend on its strides.
    """
    if not isinstance(value, torch.Tensor) or tuple(value.shape) != tuple(shape):
        return False
    if stride is not None and value.stride() != tuple(stride):
        return False
    return value.dim() > 0 or key != "step"


class SegmentState(NamedTuple):
    """A value of a segment's state."""

    segment: int
    """Number of the segment in the model."""
    key: str
    """The optimizer's name of the value."""
    value: Any
    """A tensor of any shape and dtype, or a JSON value."""
    by_element: bool
    """Whether it is a tensor with one number for each element of the segment, in storage order."""
