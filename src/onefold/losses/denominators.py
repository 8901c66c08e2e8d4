"""What PyTorch divides a loss by, over the whole batch; and totals that do not overflow."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from onefold.core.mean import Mean, Sum

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
Weight = Tensor | float
Loss = Any
"""A `Mean`, a `Sum` or a tensor, as ``reduction`` says; a union would refuse every ``+``."""


def distance(
    function: Callable[..., Tensor],
    input: Tensor,
    target: Tensor,
    reduction: str,
    weight: Tensor | None,
) -> Loss:
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
    wide = {name: widened(option) for name, option in options.items()}
    total = function(*map(widened, tensors), reduction="sum", **wide)
    return Sum(total) if reduction == "sum" else Mean(total, denominator())


def widened(value: Any) -> Any:
    """Half precision in float32: the sum over a shard would soon be beyond float16's 65504."""
    half = isinstance(value, Tensor) and value.dtype in (torch.float16, torch.bfloat16)
    return value.to(torch.float32) if half else value


def counted(target: Tensor, weight: Tensor | None, ignore_index: int) -> Tensor:
    """() how many targets count, or the sum of their classes' weights; nobody waits for a GPU."""
    counts = target != ignore_index
    if weight is None:
        return counts.sum()
    weights = weight.detach()[target.where(counts, 0)]
    return _added(weights.where(counts, 0))


def per_class(input: Tensor) -> int:
    """How many distributions over classes there are."""
    classes = input.shape[0 if input.dim() == 1 else 1]
    return input.numel() // max(classes, 1)


def _added(weights: Tensor) -> Tensor:
    wide: Tensor = widened(weights.detach())
    return wide.sum()


def common_numel(input: Tensor, *others: Tensor) -> int:
    """How many elements a loss of tensors has that are broadcast to the first one's shape.

    Were the first one to grow, a target of (n,) beside an input of (n, 1) would compare every
    sample with every other, and the whole batch would be no sum of its shards.
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
    """Whether the one is broadcast to the other."""
    ends = zip(reversed(shape), reversed(larger), strict=False)
    return len(shape) <= len(larger) and all(size in (1, other) for size, other in ends)
