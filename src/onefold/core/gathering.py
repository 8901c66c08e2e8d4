"""`gather`, by which a loss sees the tensors of all shards, and how it finds the shard it is in.

`SyncBatchNorm` gathers by it, and normalizes by the whole batch.

What is done with a tensor is up to the `Gatherer` of the shard that is being computed; those of a
step that joins shards are in `onefold.step.joint`.

Note: one place for the whole process
-------------------------------------
Only one shard computes at a time, also where shards take turns, so the gatherer is held in one
place and not in one for each thread. Backward on a GPU runs in a thread of PyTorch's, where a layer
that is computed once more (``torch.utils.checkpoint``) must find it as well.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Literal, overload

import torch

from onefold.core.flat import bits_of
from onefold.core.gatherer import GATHERER, GatheredRows, joins
from onefold.system.compat import BatchNorm

__all__ = ["SyncBatchNorm", "gather", "packed_bytes", "unpacked_bytes"]


_ALIGNED = 16
"""Bytes of the largest element of a tensor, of which packed tensors have a multiple."""


@overload
def gather(tensor: torch.Tensor, *, rows: Literal[False] = False) -> torch.Tensor: ...


@overload
def gather(tensor: torch.Tensor, *, rows: Literal[True]) -> tuple[torch.Tensor, slice]: ...


def gather(
    tensor: torch.Tensor, *, rows: bool = False
) -> torch.Tensor | tuple[torch.Tensor, slice]:
    """Return a tensor of all shards; for use inside a loss that compares samples with each other.

    Gradients flow through it to all shards, and the bits are the same for any number of devices.
    Outside of a step, and where one shard is the whole batch, it returns ``tensor`` itself.

    >>> features = torch.eye(3)
    >>> whole, own = gather(features, rows=True)
    >>> whole[own] is features or torch.equal(whole[own], features)
    True

    Args:
        tensor: (n, ...) of any dtype: this shard's rows, mostly one a sample. Number of dimensions,
            further sizes and dtype must be alike in all shards; n may differ.
        rows: whether to return which rows are this shard's as well; see `docs/do/whole-batch.md`.

    Returns:
        (N, ...) the rows of all shards in their order; with ``rows``, also the slice of the own.

    Raises:
        LossError: shards do not gather alike, or it is called where nothing can be gathered: in a
            score function, in a shard that ``microbatch`` has cut, inside of a checkpointed layer.
        TypeError, ValueError: there are no rows.

    The memory that it saves is the idea of Gao et al., Scaling Deep Contrastive Learning Batch Size
    under Memory Limited Setup, 2021.
    """
    if not isinstance(tensor, torch.Tensor):
        raise TypeError(f"expected a tensor to gather, got {type(tensor).__name__}")
    if not tensor.dim() or tensor.layout is not torch.strided:
        raise ValueError(
            f"expected a dense tensor of shape (n, ...) to gather, got shape {tuple(tensor.shape)} "
            f"({tensor.layout}). Of single numbers make a row: value.reshape(1)"
        )
    joined = join(tensor)
    if GATHERER.gatherer is not None:
        GATHERER.gatherer.sees_batch = True
    return (joined.whole, joined.own) if rows else joined.whole


def join(tensor: torch.Tensor) -> GatheredRows:
    """Gather for a layer: what the loss is a mean over does not change by it."""
    if GATHERER.gatherer is None:
        # As where rows of other shards come: without a graph in ``torch.no_grad()``.
        whole = tensor if torch.is_grad_enabled() else tensor.detach()
        return GatheredRows(whole, slice(0, len(tensor)))
    return GATHERER.gatherer.gather(tensor)


def packed_bytes(tensors: Sequence[torch.Tensor], nbytes: int) -> torch.Tensor:
    """Copy tensors one after the other, as bits, for a way on which only float64 travels.

    Args:
        tensors: all of one dtype, at least one.
        nbytes: size of the result, with zeros at its end; rounded up.

    Returns:
        (k,) float64 whose values mean nothing.
    """
    flat = torch.cat([*map(bits_of, tensors)])
    room = torch.zeros(-(-nbytes // _ALIGNED) * _ALIGNED, dtype=torch.uint8, device=flat.device)
    room[: flat.nbytes] = flat
    return room.view(torch.float64)


def unpacked_bytes(
    row: torch.Tensor, dtype: torch.dtype, shapes: Sequence[tuple[int, ...]]
) -> list[torch.Tensor]:
    """Return the tensors that `packed_bytes` has packed, as views of its result."""
    counts = [torch.Size(shape).numel() for shape in shapes]
    flat = row.view(torch.uint8)[: sum(counts) * dtype.itemsize].view(dtype)
    parts = torch.split(flat, counts)
    return [part.view(shape) for part, shape in zip(parts, shapes, strict=True)]


class SyncBatchNorm(BatchNorm):
    """Batch norm that normalizes by the whole batch of a step, and not by a shard of it.

    Arguments, names of parameters and buffers, and results in evaluation mode are those of
    `torch.nn.BatchNorm1d`, ``2d`` and ``3d``, so weights of theirs fit. Where one shard is the
    whole batch, and outside of a step, it is one of them. A model with such layers keeps what
    backward needs of all shards of a device at a time: see `docs/do/whole-batch.md`.

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

        >>> model = torch.nn.Sequential(torch.nn.Linear(2, 3), torch.nn.BatchNorm1d(3))
        >>> type(SyncBatchNorm.convert(model)[1]).__name__
        'SyncBatchNorm'
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
        """Normalize (n, C, ...) by channel, over the samples of all shards."""
        if not (self.training and joins()):
            result: torch.Tensor = super().forward(input)
            return result
        self._check_input_dim(input)
        wide = input if input.dtype == torch.float64 else input.float()
        mean, square, count = _of_all(wide)
        # Of all shards there are as many as of this one, or more: mostly nobody waits to know it.
        if wide.numel() <= wide.shape[1] and int(count) <= 1:
            raise ValueError(
                f"expected more than one value per channel in the whole batch to normalize by, got "
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


def _of_all(input: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Compute mean and sum of squared distances per channel over all shards, (C,) float64.

    Returns:
        Both, and the number of values per channel, () float64.
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
    return middle, (squares + counts * (means - middle).square()).sum(0), total
