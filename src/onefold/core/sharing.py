"""What of a batch is not cut like the rest: shared by all shards, or cut by a length of its own."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

__all__ = ["OwnLength", "Shared"]


@dataclass(frozen=True, slots=True)
class Shared:
    """A part of a batch that every shard gets whole: times, a grid, a temperature.

    In a batch of the script's own, for `Trainer.step`, `Trainer.gradient` or the rule of
    `Trainer.batches`. The loss gets what is in it, with its tensors on the device.

    Args:
        value: tensors or NumPy arrays of any shape, in any containers; anything else goes along.

    >>> def loss(model, batch):
    ...     return (model(batch["x"]) * batch["scale"]).square().mean(dim=1)
    >>> trainer = onefold.Trainer(model, optimizer, loss, shards=2)
    >>> scale = torch.tensor([0.5, 2.0])
    >>> trainer.step({"x": torch.ones(6, 2), "scale": onefold.Shared(scale)}).samples
    6
    """

    value: Any


@dataclass(frozen=True, slots=True)
class OwnLength:
    """A part of a batch with another number of samples, which is cut into shards by itself.

    Such as the points of a boundary beside those of the inside. The samples of a step are those of
    what is not wrapped; of the first such part if all is. Return an `onefold.Mean` for each
    part: a scalar, which is the mean of a shard, is refused where the sizes of shards are not in
    proportion.

    Args:
        value: tensors or NumPy arrays, in any containers, alike in the length of ``dim``.
        dim: the dimension in which the samples lie.

    >>> def loss(model, batch):
    ...     inside, edge = (model(part).square().mean(dim=1) for part in batch)
    ...     of_inside = onefold.Mean(inside.sum(), len(inside))
    ...     return of_inside + onefold.Mean(edge.sum(), len(edge))
    >>> trainer = onefold.Trainer(model, optimizer, loss, shards=2)
    >>> trainer.step((torch.ones(6, 2), onefold.OwnLength(torch.ones(3, 2)))).samples
    6
    """

    value: Any
    dim: int = 0
