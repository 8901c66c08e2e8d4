"""What all shards of a step have in common."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch

from onefold.core.batch import ShardedBatch
from onefold.core.gathering import Gatherer
from onefold.core.values import ShardValues
from onefold.core.weights_of_step import LATE, total_weight
from onefold.engine.gradients import Gradients, add_gradients
from onefold.exchange.carrier import Gift

__all__ = ["LossFunction", "PieceResult", "ShardPiece", "ShardTask"]


LossFunction = Callable[[torch.nn.Module, Any], object]
"""Takes the model and one shard; see `onefold.core.mean.weigh` for what it may return."""


@dataclass(frozen=True, slots=True)
class ShardTask:
    """What all shards of a step have in common."""

    loss: LossFunction
    seed: int
    """The run's seed."""
    step: int
    """The number of the step."""
    shards: int
    """How many shards every batch is cut into."""
    modes: bytes
    """The modes of the module's parts, put back after every shard where there are several."""
    trainable: Sequence[bool]
    """Which parameters require a gradient; put back after every shard where there are several."""
    scale: float = 1.0
    """What the loss is multiplied by before backward: a power of two."""
    due: bool = False
    """Whether to make the checks that cost more."""
    divisors: Sequence[float] | None = None
    """The divisor of each term of the loss, if it has several; None while they are not known."""
    microbatch: int | None = None
    """The most samples of a shard that run at once; None for all of them."""
    left_out: Sequence[int] = ()
    """Numbers of trained parameters whose gradients are dropped: the step is not theirs."""
    gatherers: Callable[[int], Gatherer] | None = None
    """What `onefold.gather` does in each shard; None while no loss has been seen to call it."""

    give: Callable[[Gift], None] | None = None
    """Takes the gradients of a stage as soon as they are complete; None if shards keep them."""

    bringing: Callable[[], AbstractContextManager[Callable[[], None]]] | None = None
    """Surrounds a forward pass and its backward, and has parameters brought while they are needed;
    what it yields is called between the two. None where they are at hand."""

    def is_plain(self, batch: ShardedBatch) -> bool:
        """Whether one forward pass sees the whole batch, as in a plain loop."""
        return self.shards == 1 and (self.microbatch is None or batch.samples <= self.microbatch)

    def divisor(self, batch: ShardedBatch, weight: float) -> float:
        """What gradients are divided by in backward, before the whole batch's weight is known.

        That is the number of samples, the only divisor that every device knows before all forwards
        are done. Where one forward pass sees the whole batch, its ``weight`` is that of the batch.
        """
        return weight if self.is_plain(batch) else float(batch.samples)


class ShardPiece(NamedTuple):
    """Samples of a shard that run at once: mostly all of them."""

    shard: int
    start: int
    stop: int
    of: int
    """Number of samples in the whole shard."""

    @property
    def samples(self) -> int:
        return self.stop - self.start


class PieceResult(NamedTuple):
    """The result of one piece, or of several: see `ShardResult`."""

    gradients: Gradients
    given: Sequence[bool]
    """Of gradients that have been handed over, for which parameters there were any."""
    total: torch.Tensor | None
    weight: float
    values: ShardValues | None = None

    def plus(self, other: PieceResult, step: int) -> PieceResult:
        """Add the next piece of the shard; this one's memory takes the sum."""
        found = total_weight([self.weight, other.weight], [1, 1], step)
        # Kinds are alike, or they would have been refused: a code stands for itself.
        weight = LATE if found.late else self.weight if self.weight < 0 else found.value
        values = _added(self.values, other.values, f"step {step}")
        return PieceResult(
            add_gradients(self.gradients, other.gradients),
            [one or another for one, another in zip(self.given, other.given, strict=True)],
            None if self.total is None or other.total is None else self.total + other.total,
            weight,
            values,
        )


def _added(one: ShardValues | None, other: ShardValues | None, where: str) -> ShardValues | None:
    if one is None:
        return None if other is None else other.plus(one, where)
    return one.plus(other, where)
