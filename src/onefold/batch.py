"""A global batch, cut into shards."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch

from onefold.shard import Plan, cut_bounds

__all__ = ["DataPass", "ShardedBatch", "cut_batch", "move"]


@dataclass(slots=True)
class DataPass:
    """One pass of a loader over its data set."""

    number: int
    """Which pass of the run it is."""
    used: int
    """How many of its samples the steps so far have used."""
    epoch: int | None
    """The epoch that it was begun in; None for outside."""
    end: int
    """How many of its samples will have been used when all batches are."""
    given: int = 0
    """How many of its samples have been handed out."""
    over: bool = False
    """No more batches will come."""
    broken_off: bool = False
    """There would have been more."""
    abandoned: bool = False
    """The run went elsewhere meanwhile: its batches must not be used."""


@dataclass(frozen=True, slots=True)
class ShardedBatch:
    """The shards of one batch that this process runs; what a loader yields and ``step`` takes."""

    samples: int
    """Samples of the whole batch, over all devices."""
    plan: Plan
    """Who runs which shard of this batch."""
    shards: Mapping[int, object] = field(repr=False)
    """Shard number to its collated samples; empty shards are left out."""
    epoch: int = 0
    """Which pass over the data it belongs to."""
    waited: tuple[float, float] | None = field(default=None, repr=False, compare=False)
    """From when to when a loader was waited for, in seconds on the host's clock."""
    data_pass: DataPass | None = field(default=None, repr=False, compare=False)
    """The loader's pass that it belongs to, if a loader made it."""
    stop: int = 0
    """How many samples of that pass are used once this batch is."""
    loader: int = -1
    """Number of the loader that made it; -1 if a script cut it itself."""
    data_digest: int = 0
    """Of the data set, alike where the data are; 0 where no loader computed it."""
    digest: int = 0

    @property
    def pass_number(self) -> int:
        """Number of the loader's pass that it belongs to; -1 if no loader made it."""
        return -1 if self.data_pass is None else self.data_pass.number

    @property
    def sizes(self) -> list[int]:
        """Samples of each shard."""
        return [stop - start for start, stop in cut_bounds(self.samples, self.plan.shards)]

    def divisor(self, weight: float) -> float:
        """What gradients are divided by in backward, before the whole batch's weight is known.

        Several shards: the samples are known before all forwards are, other weights only after.
        One shard: its ``weight`` is that of the batch.
        """
        return weight if self.plan.shards == 1 else float(self.samples)

    def size_of(self, shard: int) -> int:
        """Samples of one shard."""
        start, stop = cut_bounds(self.samples, self.plan.shards)[shard]
        return stop - start


def cut_batch(batch: object, plan: Plan, shards_run: Iterable[int], epoch: int = 0) -> ShardedBatch:
    """Cut a whole batch along the first dimension of its tensors.

    Args:
        batch: a tensor (n, ...), or tuples, lists and dicts of them.
        plan: who runs what.
        shards_run: the shards that this process keeps.
        epoch: which pass over the data it belongs to.

    Raises:
        ValueError: the tensors disagree in length, or there is nothing to cut.
        TypeError: it holds something that is neither a tensor nor one of these containers.
    """
    samples = _common_length(batch)
    bounds = cut_bounds(samples, plan.shards)
    kept = {shard: bounds[shard] for shard in shards_run if bounds[shard][0] < bounds[shard][1]}
    shards = {shard: _map(batch, _slicer(start, stop)) for shard, (start, stop) in kept.items()}
    return ShardedBatch(samples=samples, plan=plan, shards=shards, epoch=epoch)


def move(payload: object, device: torch.device) -> object:
    """The same structure with every tensor on ``device``; anything else is left as it is."""
    return _map(payload, lambda leaf: leaf.to(device, non_blocking=True), strict=False)


def _slicer(start: int, stop: int) -> Callable[[torch.Tensor], torch.Tensor]:
    return lambda leaf: leaf[start:stop]


def _common_length(batch: object) -> int:
    lengths: dict[str, int] = {}
    for path, leaf in _leaves(batch, "batch"):
        if leaf.dim() == 0:
            raise ValueError(f"{path} is a scalar tensor: expected a first dimension of samples")
        lengths[path] = len(leaf)
    if not lengths:
        raise ValueError("the batch holds no tensor: expected a tensor, or containers of tensors")
    if len(set(lengths.values())) > 1:
        listed = ", ".join(f"{path} has {length}" for path, length in lengths.items())
        raise ValueError(f"the tensors of a batch must agree in their first dimension: {listed}")
    return next(iter(lengths.values()))


def _leaves(batch: object, path: str) -> Iterator[tuple[str, torch.Tensor]]:
    if isinstance(batch, torch.Tensor):
        yield path, batch
    elif isinstance(batch, tuple | list):
        for index, value in enumerate(batch):
            yield from _leaves(value, f"{path}[{index}]")
    elif isinstance(batch, Mapping):
        for key, value in batch.items():
            yield from _leaves(value, f"{path}[{key!r}]")
    else:
        raise TypeError(
            f"{path}: expected a tensor or a tuple, list or dict of tensors, got "
            f"{type(batch).__name__}. Use trainer.loader for anything that is not a tensor"
        )


def _map(
    batch: object, change: Callable[[torch.Tensor], torch.Tensor], *, strict: bool = True
) -> object:
    if isinstance(batch, torch.Tensor):
        return change(batch)
    if isinstance(batch, tuple) and hasattr(batch, "_fields"):
        fields: list[Any] = [_map(value, change, strict=strict) for value in batch]
        return type(batch)(*fields)
    if isinstance(batch, list):
        return [_map(value, change, strict=strict) for value in batch]
    if isinstance(batch, tuple):
        return tuple([_map(value, change, strict=strict) for value in batch])
    if isinstance(batch, Mapping):
        return {key: _map(value, change, strict=strict) for key, value in batch.items()}
    if strict:
        raise TypeError(f"expected tensors, got {type(batch).__name__}")
    return batch
