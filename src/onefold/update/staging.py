"""The segments that this process updates, and how they come to the device that computes with them.

`OwnedSegment` is a segment of the model that a device of this process updates, `SegmentState` one
value of its optimizer state. `Staging` brings segments that are kept in other memory to the device
while they are updated.

Note: what is computed where
----------------------------
Where a device keeps nothing, gradients are added up in the memory of the host: a sum of two numbers
has the same bits everywhere, and so has a product with one number that the host knows. (A script
that flushes denormal numbers on the host has others there.) All else is computed on the device, one
segment or one stage at a time, as processors and GPUs order the additions of a norm differently,
and round a product that is added at once in another place.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any, NamedTuple

import torch

from onefold.core.flat import FlatTensors, Segment
from onefold.system.allocator import TensorAllocator

if TYPE_CHECKING:
    pass

__all__ = ["DeviceStaging", "OwnedSegment", "SegmentState", "Staging", "is_by_element"]


Divided = Callable[[], Sequence[Collection[torch.Tensor]]]
Change = Callable[[Sequence[torch.Tensor], Sequence[torch.Tensor]], None]


class Staging:
    """Segments and their state stay where they are updated, in the memory of an allocator.

    Args:
        device: that computes.
        allocator: has what is kept.
        optimizer: whose segments they are.
    """

    moves = False
    """Whether segments are kept in other memory than that in which the device computes."""

    def __init__(
        self, device: torch.device, allocator: TensorAllocator, optimizer: torch.optim.Optimizer
    ) -> None:
        self._device, self._allocator, self._optimizer = device, allocator, optimizer
        self._came: dict[torch.Tensor, frozenset[str]] = {}
        """For each segment that has been updated, what of its state the optimizer had there."""

    def new(self, shape: Sequence[int], stride: Sequence[int], dtype: torch.dtype) -> torch.Tensor:
        """A tensor of any content, where segments are kept."""
        return torch.empty_strided(shape, stride, dtype=dtype, device=self._device)

    def change(
        self, change: Change, tensors: Sequence[torch.Tensor], by: Sequence[torch.Tensor] = ()
    ) -> None:
        """Change tensors that are kept, on the device that computes.

        Args:
            change: is given tensors to write to and others to read, both on the device.
            tensors: overwritten.
            by: one for each of these; or none.
        """
        change(tensors, by)

    def updating(self, divided: Divided) -> AbstractContextManager[None]:
        """Have segments on the device inside this context; what becomes of them is kept.

        Args:
            divided: for each group of the optimizer, the values of those of its segments that come.
        """
        return nullcontext()


class DeviceStaging(Staging):
    """Brings segments and their state to a device while they are updated."""

    moves = True

    def new(self, shape: Sequence[int], stride: Sequence[int], dtype: torch.dtype) -> torch.Tensor:
        flat = self._allocator.empty(math.prod(shape) * dtype.itemsize).view(dtype)
        return flat.as_strided(shape, stride)

    def change(
        self, change: Change, tensors: Sequence[torch.Tensor], by: Sequence[torch.Tensor] = ()
    ) -> None:
        for place, tensor in enumerate(tensors):
            there = tensor.to(self._device, copy=True)
            change([there], [each.to(self._device) for each in by[place : place + 1]])
            tensor.copy_(there)

    @contextmanager
    def updating(self, divided: Divided) -> Iterator[None]:
        # Each leaves, whatever happens to others, and also if some cannot come.
        with ExitStack() as leaving:
            for group, segments in zip(self._optimizer.param_groups, divided(), strict=True):
                # Of a state that was loaded: counts of steps are read on the host, but by kernels
                # that want them on the device.
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
        leaving.callback(partial(self._leave, values, stays, along))
        # Through .data, as the optimizer finds the state by this very object.
        values.data = stays.to(self._device, copy=True)
        for key, value in along.items():
            state[key] = value.to(self._device, copy=True)

    def _leave(
        self, values: torch.Tensor, stays: torch.Tensor, along: dict[str, torch.Tensor]
    ) -> None:
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
    """Which elements of which parameter it covers."""
    parameter: torch.nn.Parameter
    """The user's own parameter that it is cut from; its group and earlier state are found by it."""
    values: torch.Tensor
    """The segment's values on its device, which the optimizer updates in place: (numel,), or shaped
    as the parameter where the segment is whole. Models compute with these very values, unless they
    hold parameters in a lower precision, or only for a while."""
    home: FlatTensors | None = None
    """The device's memory of parameters, where models then see the values, rounded or not."""

    @property
    def shown(self) -> torch.Tensor | None:
        """Where models see the values, if that is elsewhere; there must be memory for it."""
        return None if self.home is None else self.home.segment(self.segment)


def is_by_element(
    key: str, value: object, shape: Sequence[int], stride: Sequence[int] | None = None
) -> bool:
    """Whether a value of an optimizer's state has one number for each element of its parameter.

    A count of steps does not, even where the parameter is a single number as well.

    Args:
        key: the optimizer's name of the value.
        value: any value of a state.
        shape: the shape of the parameter.
        stride: the parameter's, if it is never cut. A value that lies otherwise then stays as it
            is: it may be a matrix to multiply with, whose bits depend on how it lies.
    """
    if not isinstance(value, torch.Tensor) or tuple(value.shape) != tuple(shape):
        return False
    if stride is not None and value.stride() != tuple(stride):
        return False
    return value.dim() > 0 or key != "step"


class SegmentState(NamedTuple):
    """One value of the state of one segment."""

    segment: int
    """Number of the segment, among those of the model."""
    key: str
    """The optimizer's name of the value."""
    value: Any
    """A tensor of any shape and dtype, or what JSON can hold."""
    by_element: bool
    """Whether it is a tensor with one number for each element of the segment, in storage order."""
