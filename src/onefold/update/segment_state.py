"""The optimizer's state of one segment."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

import torch

if TYPE_CHECKING:
    pass

__all__ = ["SegmentState", "is_by_element"]


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
