"""Batch norm over the whole batch, whoever computes its shards."""

from __future__ import annotations

from typing import Any

import torch

from onefold.core.gathering import join, joins
from onefold.system.compat import BatchNorm

__all__ = ["SyncBatchNorm"]


class SyncBatchNorm(BatchNorm):
    """Batch norm that normalises by the whole batch of a step, and not by a shard of it.

    Arguments, names of parameters and buffers, and results in evaluation mode are those of
    `torch.nn.BatchNorm1d`, ``2d`` and ``3d``, so weights of theirs fit. Where one shard is the
    whole batch, and outside of a step, it is one of them. A model with such layers keeps what
    backward needs of all shards of a device at a time: see `docs/whole-batch.md`.

    >>> model = torch.nn.Sequential(torch.nn.Linear(3, 4), torch.nn.BatchNorm1d(4))
    >>> [type(layer).__name__ for layer in SyncBatchNorm.convert(model)]
    ['Linear', 'SyncBatchNorm']

    Raises:
        ValueError: its input has fewer than two dimensions, or one value per channel.
    """

    @classmethod
    def convert(cls, model: torch.nn.Module) -> torch.nn.Module:
        """Put such layers in the place of all batch norms of a model, before its Trainer is made.

        Parameters and buffers stay the same objects, so an optimizer that holds them still fits.

        Args:
            model: changed in place; hooks on the layers that are replaced are lost.

        Returns:
            The model; a new layer if it is a batch norm itself.

        Raises:
            ValueError: a batch norm is lazy and has not seen its first input.
        """
        made: dict[torch.nn.Module, torch.nn.Module] = {}
        # One layer in two places stays one layer.
        for place, part in list(model.named_modules(remove_duplicate=False)):
            if place and isinstance(part, BatchNorm) and not isinstance(part, cls):
                made[part] = made.get(part) or cls._of(part)
                prefix, _, name = place.rpartition(".")
                setattr(model.get_submodule(prefix), name, made[part])
        ready = not isinstance(model, BatchNorm) or isinstance(model, cls)
        return model if ready else cls._of(model)

    @classmethod
    def _of(cls, norm: Any) -> SyncBatchNorm:
        if isinstance(norm.weight, torch.nn.UninitializedParameter):
            raise ValueError(
                f"{type(norm).__name__} does not know its number of channels: run one forward "
                f"pass before SyncBatchNorm.convert"
            )
        new = cls(norm.num_features, norm.eps, norm.momentum, norm.affine, norm.track_running_stats)
        new.weight, new.bias = norm.weight, norm.bias
        new.running_mean, new.running_var = norm.running_mean, norm.running_var
        new.num_batches_tracked = norm.num_batches_tracked
        new.training = norm.training
        return new

    def forward(self, input: torch.Tensor) -> torch.Tensor:
        """Normalise (n, C, ...) by channel, over the samples of all shards."""
        if not (self.training and joins()):
            result: torch.Tensor = super().forward(input)
            return result
        self._check_input_dim(input)
        wide = input if input.dtype == torch.float64 else input.float()
        mean, square, count = _of_all(wide)
        if count <= 1:
            raise ValueError(
                f"expected more than one value per channel in the whole batch to normalise by, got "
                f"input of shape {tuple(input.shape)}"
            )
        self._track(mean.detach(), square.detach() / (count - 1))
        scale = (square / count + self.eps).rsqrt()
        if self.weight is not None:
            scale = scale * self.weight.double()
        shift = -mean * scale
        if self.bias is not None:
            shift = shift + self.bias.double()
        # In float64 up to here, where it is two numbers per channel. One operation for the rest:
        # backward then keeps the input once, as it does for batch norm.
        shape = (1, -1, *[1] * (input.dim() - 2))
        narrow = [each.to(wide.dtype).view(shape) for each in (shift, scale)]
        normal = torch.addcmul(narrow[0], wide, narrow[1])
        return normal.to(input.dtype)

    def _check_input_dim(self, input: torch.Tensor) -> None:
        if input.dim() < 2:
            raise ValueError(f"expected input (n, C, ...), got shape {tuple(input.shape)}")

    def _track(self, mean: torch.Tensor, variance: torch.Tensor) -> None:
        """Move the running statistics, alike in all shards."""
        if not self.track_running_stats or self.running_mean is None or self.running_var is None:
            return
        share = self.momentum
        if self.num_batches_tracked is not None:
            self.num_batches_tracked.add_(1)
            if share is None:
                share = 1.0 / float(self.num_batches_tracked)
        for running, new in ((self.running_mean, mean), (self.running_var, variance)):
            running.lerp_(new.to(running.dtype), share or 0.0)


def _of_all(input: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, int]:
    """Compute mean and sum of squared distances per channel over all shards, (C,) float64.

    Returns:
        Both, and the number of values per channel.
    """
    channels, own = input.shape[1], input.numel() // input.shape[1]
    variance, mean = torch.var_mean(input, [0, *range(2, input.dim())], correction=0)
    count = mean.new_full((1,), own, dtype=torch.float64)
    row = torch.cat([mean.double(), variance.double() * own, count])
    rows = join(row.unsqueeze(0)).whole  # (V, 2 C + 1), of shards with samples
    counts = rows[:, -1:].detach()
    total = counts.sum()
    means, squares = rows[:, :channels], rows[:, channels:-1]
    middle = (means * counts).sum(0) / total
    # Not by the mean of squares, of which nothing is left where the mean is large. As in Chan et
    # al., Updating Formulae and a Pairwise Algorithm for Computing Sample Variances, 1979.
    return middle, (squares + counts * (means - middle).square()).sum(0), int(total)
