"""Finds what PyTorch divides a loss by, and totals that do not overflow.

Note: denominators without waiting
----------------------------------
A denominator that depends on the targets stays a tensor on their device. Reading it as a number
here would make the host wait for a GPU in the middle of the user's loss. For the same reason it is
computed by operations whose output shape is fixed: a boolean mask as an index would make the host
wait for the number of its true values.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from onefold.core.mean import Mean, Sum, mean_of_whole, sees_whole_batch

__all__ = [
    "Loss",
    "Tensor",
    "Weight",
    "common_numel",
    "counted",
    "distance",
    "per_class",
    "reduced",
    "widened",
]

Tensor = torch.Tensor
# () tensor without gradient, or a number.
Weight = Tensor | float
Loss = Any
"""A `Mean`, a `Sum` or a tensor, depending on ``reduction``; a union type would reject ``+``."""


def distance(
    function: Callable[..., Tensor],
    input: Tensor,
    target: Tensor,
    reduction: str,
    weight: Tensor | None,
) -> Loss:
    # A weighted mean of these losses is one of the few that PyTorch divides by the sum of weights.
    numel = common_numel(input, target)
    if weight is None:
        return reduced(function, (input, target), reduction, lambda: numel)
    return reduced(function, (input, target), reduction, lambda: _added(weight), weight=weight)


def reduced(
    function: Callable[..., Tensor],
    tensors: tuple[object, ...],
    reduction: str,
    denominator: Callable[[], Weight],
    **options: Any,
) -> Loss:
    if reduction == "none":
        return function(*tensors, reduction=reduction, **options)
    if reduction not in ("mean", "sum"):
        raise ValueError(
            f"expected reduction to be 'mean', 'sum' or 'none' ('batchmean' as well for kl_div), "
            f"got {reduction!r}"
        )
    if sees_whole_batch():
        # The bits of the plain loop: nothing is added to this.
        value = function(*tensors, reduction=reduction, **options)
        return Sum(value) if reduction == "sum" else mean_of_whole(value, denominator())
    # The loss function itself adds up, in float32 or better. The denominator is only computed where
    # it is needed: on a GPU it is several kernels.
    wide = {name: widened(option) for name, option in options.items()}
    total = function(*map(widened, tensors), reduction="sum", **wide)
    return Sum(total) if reduction == "sum" else Mean(total, denominator())


def widened(value: Any) -> Any:
    """Convert half precision to float32: a shard's sum would soon exceed float16's 65504."""
    half = isinstance(value, Tensor) and value.dtype in (torch.float16, torch.bfloat16)
    return value.to(torch.float32) if half else value


def counted(target: Tensor, weight: Tensor | None, ignore_index: int) -> Tensor:
    """() how many targets are not ignored, or the sum of the weights of their classes."""
    counts = target != ignore_index
    if weight is None:
        return counts.sum()
    # An ignored target, such as -100, is no valid index: it is replaced before the lookup, and its
    # weight by 0 afterwards.
    weights = weight.detach()[target.where(counts, 0)]
    return _added(weights.where(counts, 0))


def per_class(input: Tensor) -> int:
    """The number of distributions over classes in ``input``."""
    classes = input.shape[0 if input.dim() == 1 else 1]
    return input.numel() // max(classes, 1)


def _added(weights: Tensor) -> Tensor:
    wide: Tensor = widened(weights.detach())
    return wide.sum()


def common_numel(input: Tensor, *others: Tensor) -> int:
    """The number of elements in a loss of tensors that are broadcast to the first one's shape.

    The first one must not be broadcast itself. A target of (n,) beside an input of (n, 1) would
    make (n, n): it would compare every sample with every other, and the loss of the whole batch
    would not be a sum over its shards.
    """
    for other in others:
        if other.shape != input.shape and not _fits(other.shape, input.shape):
            raise ValueError(
                f"expected tensors of one shape, got {tuple(input.shape)} and "
                f"{tuple(other.shape)}, which would compare samples with each other. Give both the "
                f"same shape, such as with squeeze(1) or unsqueeze(1)"
            )
    return input.numel()


def _fits(shape: torch.Size, larger: torch.Size) -> bool:
    """Whether ``shape`` can be broadcast to ``larger`` without changing the latter."""
    ends = zip(reversed(shape), reversed(larger), strict=False)
    return len(shape) <= len(larger) and all(size in (1, other) for size, other in ends)
