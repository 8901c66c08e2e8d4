"""What a loss or a score function may return, and what a shard contributes to the whole batch."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from onefold.errors import LossError

__all__ = ["Contribution", "Mean", "weigh"]


@dataclass(frozen=True, slots=True)
class Mean:
    """Something that averages by its own weight, such as a loss by tokens.

    The value over the whole batch is the sum of totals over the sum of weights.

    >>> Mean(torch.tensor(6.0), 3)
    Mean(total=tensor(6.), weight=3)
    """

    total: torch.Tensor
    """() any floating dtype: the sum over the shard."""
    weight: torch.Tensor | float
    """What the total is to be divided by: () tensor or number, not negative."""


@dataclass(frozen=True, slots=True)
class Contribution:
    """One shard's part of a mean over the whole batch."""

    root: torch.Tensor
    """(n,) or (): what backward starts from."""
    share: float
    """Weight of one element of ``root`` in the total: 1, or n where ``root`` is a mean over n."""
    weight: float
    """The shard's part of the divisor."""

    def total(self) -> torch.Tensor:
        """() float64 on the shard's device: the shard's part of the numerator."""
        total = self.root.detach().sum(dtype=torch.float64)
        return total if self.share == 1.0 else total * self.share

    def backward(self, divisor: float) -> None:
        """Add the gradient of (total / divisor) to the parameters' ``.grad``.

        The seed is computed as autograd itself would for a mean, so that one shard that is the
        whole batch gives the bits of the plain loop.
        """
        seed = torch.full((), self.share, dtype=self.root.dtype, device=self.root.device) / divisor
        torch.autograd.backward(self.root, seed.expand_as(self.root))


def weigh(result: object, samples: int, what: str) -> Contribution:
    """Read what a user's function returned for a shard of ``samples`` samples.

    Args:
        result: (n,) one value a sample, () a mean over the samples, or a `Mean`.
        samples: n, at least 1.
        what: how the value is called in errors, such as ``the loss of shard 3 in step 7``.

    Raises:
        LossError: anything else, or a negative or infinite weight.
    """
    if isinstance(result, Mean):
        return _weigh_mean(result, what)
    if not isinstance(result, torch.Tensor):
        raise LossError(
            f"{what}: expected a tensor of shape ({samples},), a scalar tensor or onefold.Mean, "
            f"got {type(result).__name__}. Return the tensor itself, not .item()"
        )
    if result.shape == (samples,):
        return Contribution(root=result, share=1.0, weight=float(samples))
    if result.dim() == 0:
        return Contribution(root=result, share=float(samples), weight=float(samples))
    raise LossError(
        f"{what}: expected shape ({samples},), one value for each of the shard's samples, or a "
        f"scalar; got shape {tuple(result.shape)}. Average over the other dimensions, or return "
        f"onefold.Mean(total, weight)"
    )


def _weigh_mean(mean: Mean, what: str) -> Contribution:
    if not isinstance(mean.total, torch.Tensor) or mean.total.dim() != 0:
        came = tuple(mean.total.shape) if isinstance(mean.total, torch.Tensor) else mean.total
        raise LossError(f"{what}: the total of onefold.Mean must be a scalar tensor, got {came}")
    weight = _number(mean.weight, what)
    if not 0 <= weight < float("inf"):
        raise LossError(f"{what}: the weight of onefold.Mean must be finite and >= 0, got {weight}")
    return Contribution(root=mean.total, share=1.0, weight=weight)


def _number(weight: object, what: str) -> float:
    if isinstance(weight, torch.Tensor) and weight.numel() == 1:
        return float(weight.detach())
    if isinstance(weight, int | float):
        return float(weight)
    came = tuple(weight.shape) if isinstance(weight, torch.Tensor) else repr(weight)
    raise LossError(
        f"{what}: the weight of onefold.Mean must be a number or a scalar tensor, got {came}"
    )
