"""`gather`, which gives a loss the tensors of all shards, and `SyncBatchNorm`, which uses it.

`SyncBatchNorm` normalizes over the whole batch.

The `Gatherer` of the shard being computed decides what happens to a tensor; those of a step that
joins shards are in `onefold.step.joint`.

Note: one gatherer per process
------------------------------
Only one shard computes at a time, even if shards take turns, so the gatherer is stored once per
process and not per thread. Backward on a GPU runs in a thread of PyTorch, and a layer that it
recomputes (``torch.utils.checkpoint``) must find the gatherer there too.
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
"""Size of the largest tensor element, in bytes; packed tensors are padded to a multiple of it."""


@overload
def gather(tensor: torch.Tensor, *, rows: Literal[False] = False) -> torch.Tensor: ...


@overload
def gather(tensor: torch.Tensor, *, rows: Literal[True]) -> tuple[torch.Tensor, slice]: ...


def gather(
    tensor: torch.Tensor, *, rows: bool = False
) -> torch.Tensor | tuple[torch.Tensor, slice]:
    """Return the rows of all shards, for a loss that compares samples with each other.

    Gradients flow through it to all shards, and the bits are the same for any number of devices.
    Outside a step, and if one shard is the whole batch, it returns ``tensor`` itself.

    >>> features = torch.eye(3)
    >>> whole, own = gather(features, rows=True)
    >>> whole[own] is features or torch.equal(whole[own], features)
    True

    Args:
        tensor: (n, ...) of any dtype: rows of this shard, usually one per sample. The number of
            dimensions, the other sizes and the dtype must be the same in all shards; n may
            differ.
        rows: whether to also return which rows belong to this shard; see
            https://onefold.example/do/whole-batch.html.

    Returns:
        (N, ...) the rows of all shards, in order; with ``rows``, also the slice of this shard's
        rows.

    Raises:
        LossError: shards gather different tensors, or the call is in a place that does not
            support gathering: a metric function, a shard cut by ``microbatch``, a checkpointed
            layer.
        TypeError, ValueError: ``tensor`` has no rows.

    This saves memory with the idea of Gao et al., Scaling Deep Contrastive Learning Batch Size
    under Memory Limited Setup, 2021.
    """
    if not isinstance(tensor, torch.Tensor):
        raise TypeError(f"gather expects a tensor, but got {type(tensor).__name__}")
    if not tensor.dim() or tensor.layout is not torch.strided:
        raise ValueError(
            f"gather expects a dense tensor of shape (n, ...), but got shape {tuple(tensor.shape)} "
            f"({tensor.layout}). For a scalar, pass value.reshape(1)"
        )
    joined = join(tensor)
    if GATHERER.gatherer is not None:
        GATHERER.gatherer.sees_batch = True
    return (joined.whole, joined.own) if rows else joined.whole


def join(tensor: torch.Tensor) -> GatheredRows:
    """Gather for a layer, which does not affect what the loss is a mean over."""
    if GATHERER.gatherer is None:
        # Detached in ``torch.no_grad()``, as gathered rows of other shards are.
        whole = tensor if torch.is_grad_enabled() else tensor.detach()
        return GatheredRows(whole, slice(0, len(tensor)))
    return GATHERER.gatherer.gather(tensor)


def packed_bytes(tensors: Sequence[torch.Tensor], nbytes: int) -> torch.Tensor:
    """Copy the bits of tensors one after the other, for a transport that carries only float64.

    Args:
        tensors: at least one tensor, all of one dtype.
        nbytes: size of the result in bytes, padded with zeros; rounded up.

    Returns:
        (k,) float64; its numeric values are meaningless.
    """
    flat = torch.cat([*map(bits_of, tensors)])
    room = torch.zeros(-(-nbytes // _ALIGNED) * _ALIGNED, dtype=torch.uint8, device=flat.device)
    room[: flat.nbytes] = flat
    return room.view(torch.float64)


def unpacked_bytes(
    row: torch.Tensor, dtype: torch.dtype, shapes: Sequence[tuple[int, ...]]
) -> list[torch.Tensor]:
    """Unpack the tensors in a result of `packed_bytes`, as views of it."""
    counts = [torch.Size(shape).numel() for shape in shapes]
    flat = row.view(torch.uint8)[: sum(counts) * dtype.itemsize].view(dtype)
    parts = torch.split(flat, counts)
    return [part.view(shape) for part, shape in zip(parts, shapes, strict=True)]


class SyncBatchNorm(BatchNorm):
    """Batch norm that normalizes over the whole batch of a step, instead of one shard.

    Arguments, names of parameters and buffers, and results in evaluation mode are those of
    `torch.nn.BatchNorm1d`, ``2d`` and ``3d``, so their weights can be loaded. If one shard is the
    whole batch, and outside a step, it computes the same as these. In a model with such layers,
    each device keeps what backward needs for all of its shards at once: see
    https://onefold.example/do/whole-batch.html.

    >>> model = torch.nn.Sequential(torch.nn.Linear(3, 4), torch.nn.BatchNorm1d(4))
    >>> [type(layer).__name__ for layer in SyncBatchNorm.convert(model)]
    ['Linear', 'SyncBatchNorm']

    Raises:
            ValueError: the input has fewer than two dimensions, or one value per channel.
    """

    @classmethod
    def convert(cls, model: torch.nn.Module) -> torch.nn.Module:
        """Replace all batch norms of a model by such layers, before Trainer is created.

        Parameters and buffers stay the same objects, so an optimizer that holds them remains valid.

        Args:
            model: changed in place; hooks on replaced layers are lost.

        Returns:
            The model; a new layer if the model is itself a batch norm.

        Raises:
            ValueError: a batch norm is lazy and has not seen its first input.

        >>> model = torch.nn.Sequential(torch.nn.Linear(2, 3), torch.nn.BatchNorm1d(3))
        >>> type(SyncBatchNorm.convert(model)[1]).__name__
        'SyncBatchNorm'
        """
        made: dict[torch.nn.Module, torch.nn.Module] = {}
        # A layer that is used in two places stays one layer.
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
                f"{type(norm).__name__} does not know its number of channels yet. Run one forward "
                f"pass before SyncBatchNorm.convert"
            )
        new = cls(norm.num_features, norm.eps, norm.momentum, norm.affine, norm.track_running_stats)
        new.weight, new.bias = norm.weight, norm.bias
        new.running_mean, new.running_var = norm.running_mean, norm.running_var
        new.num_batches_tracked = norm.num_batches_tracked
        new.training = norm.training
        return new

    def forward(self, input: torch.Tensor) -> torch.Tensor:
        """Normalize (n, C, ...) per channel, over the samples of all shards."""
        if not (self.training and joins()):
            result: torch.Tensor = super().forward(input)
            return result
        self._check_input_dim(input)
        wide = input if input.dtype == torch.float64 else input.float()
        mean, square, count = _of_all(wide)
        # The whole batch has at least as many values as this shard, so this usually skips the sync.
        if wide.numel() <= wide.shape[1] and int(count) <= 1:
            raise ValueError(
                f"batch norm requires more than one value per channel in the whole batch, but got "
                f"input of shape {tuple(input.shape)}"
            )
        self._track(mean.detach(), square.detach() / (count - 1))
        scale = (square / count + self.eps).rsqrt()
        if self.weight is not None:
            scale = scale * self.weight.double()
        shift = -mean * scale
        if self.bias is not None:
            shift = shift + self.bias.double()
        # In float64 up to here, because these are two numbers per channel. One operation does the
        # rest, so that backward keeps the input once, as in ordinary batch norm.
        shape = (1, -1, *[1] * (input.dim() - 2))
        narrow = [each.to(wide.dtype).view(shape) for each in (shift, scale)]
        normal = torch.addcmul(narrow[0], wide, narrow[1])
        return normal.to(input.dtype)

    def _check_input_dim(self, input: torch.Tensor) -> None:
        if input.dim() < 2:
            raise ValueError(f"expected input (n, C, ...), but got shape {tuple(input.shape)}")

    def _track(self, mean: torch.Tensor, variance: torch.Tensor) -> None:
        """Update the running statistics, equally in all shards."""
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
    """Compute mean and sum of squared deviations per channel over all shards, (C,) float64.

    Returns:
        Both, and the number of values per channel, () float64.
    """
    channels, own = input.shape[1], input.numel() // input.shape[1]
    variance, mean = torch.var_mean(input, [0, *range(2, input.dim())], correction=0)
    count = mean.new_full((1,), own, dtype=torch.float64)
    row = torch.cat([mean.double(), variance.double() * own, count])
    rows = join(row.unsqueeze(0)).whole  # (shards with samples, 2 C + 1)
    counts = rows[:, -1:].detach()
    total = counts.sum()
    means, squares = rows[:, :channels], rows[:, channels:-1]
    middle = (means * counts).sum(0) / total
    # The mean of squares would cancel if the mean is large. See Chan et al., Updating Formulae and
    # a Pairwise Algorithm for Computing Sample Variances, 1979.
    return middle, (squares + counts * (means - middle).square()).sum(0), total
