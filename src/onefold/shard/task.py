"""What all shards of a step have in common, and what the loss of each means for the step.

`ShardTask` is what all shards of a step have in common. `of_one_divisor`, `backward` and
`gatherer_of` decide what a shard's loss means for the step: its divisors, its backward, and what it
may gather. `ShardPiece` has samples of a shard that run at once.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import torch

from onefold.core.batch import ShardedBatch
from onefold.core.gathering import Discovering, Gatherer, Refusing
from onefold.core.mean import Contribution
from onefold.core.values import LATE, SUM, Gradients, ShardValues, several, total_weight
from onefold.errors import LossError
from onefold.exchange.stageexchange import GradientSend
from onefold.shard.gradients import add_gradients

__all__ = [
    "LossFunction",
    "PieceResult",
    "ShardPiece",
    "ShardTask",
    "added_weights",
    "backward",
    "code_of",
    "gatherer_of",
    "kinds_and_weights",
    "of_one_divisor",
    "refuse_uneven",
    "without_graph",
]


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
    run_checks: bool = False
    """Whether to make the checks that cost more."""
    divisors: Sequence[float] | None = None
    """The divisor of each term of the loss, if it has several; None while they are not known."""
    microbatch: int | None = None
    """The most samples of a shard that run at once; None for all of them."""
    left_out: Sequence[int] = ()
    """Numbers of trained parameters whose gradients are dropped: the step is not theirs."""
    gatherers: Callable[[int], Gatherer] | None = None
    """What `onefold.gather` does in each shard; None while no loss has been seen to call it."""

    send: Callable[[GradientSend], None] | None = None
    """Takes the gradients of a stage as soon as they are complete; None if shards keep them."""

    gathered: Callable[[], AbstractContextManager[Callable[[], None]]] | None = None
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


_OF_PIECES = (
    "onefold.gather (or onefold.SyncBatchNorm) was called in a piece of a shard, as microbatch has "
    "cut it: expected a whole shard, whose pieces do not know each other. Use more shards instead "
    "of microbatch: each is smaller, and gather joins them all"
)


def refuse_uneven(batch: ShardedBatch, found: Iterable[object], where: str) -> None:
    """Refuse means of shards that are not means of the batch, as its parts are cut unevenly.

    Raises:
        LossError: a loss, or a value beside it, is a scalar.
    """
    # Asked in every step: nearly all batches have no such parts.
    if batch.others and (length := batch.uneven) is not None:
        for value in found:
            if isinstance(value, torch.Tensor) and not value.dim():
                raise LossError(
                    f"the loss of {where} is a scalar, read as the mean of the shard, in a batch "
                    f"of {batch.samples} and {length} samples, of which {batch.plan.shards} shards "
                    f"have no equal shares: expected onefold.Mean(total, weight) for each term, or "
                    f"sizes that are multiples of {batch.plan.shards}"
                )


def without_graph(part: Contribution) -> Contribution:
    """Drop the graph of a loss, and keep its values."""
    return replace(part, root=part.root.detach(), terms=())


def kinds_and_weights(part: Contribution) -> list[tuple[str, float]]:
    """The kind and the weight of each term of a loss."""
    return [(each.kind, each.weight) for each in part.parts]


def added_weights(
    rows: Sequence[Sequence[tuple[str, float]]], where: str
) -> list[tuple[str, float]]:
    """Add up the weight of each term of a shard's loss over the shard's pieces."""
    if any([kind for kind, _ in row] != [kind for kind, _ in rows[0]] for row in rows):
        raise LossError(
            f"the loss of {where} has other terms in some pieces of the shard than in others: "
            f"expected the same for every piece; one with nothing to count has the weight 0"
        )
    return [(of[0][0], sum(weight for _, weight in of)) for of in zip(*rows, strict=True)]


def of_one_divisor(part: Contribution, batch: ShardedBatch, task: ShardTask) -> Contribution:
    """Combine the terms of a loss into one, where the whole batch's weights are known."""
    # Of the whole batch the own weights are already the divisors.
    own = [each.weight for each in part.parts]
    divisors = own if task.is_plain(batch) else task.divisors
    if divisors is None:
        return part
    whole = part.combine(divisors)
    # A combined loss counts as a sum, and a sum is never skipped. A batch in which no term has any
    # weight must be: as a mean of weight 0 it leads to the verdict that there is nothing to count.
    return whole if any(divisors) else replace(whole, kind="mean", weight=0.0)


def gatherer_of(piece: ShardPiece, batch: ShardedBatch, task: ShardTask) -> Gatherer | None:
    """Find what `onefold.gather` does in a piece; None where it sees the whole batch anyway."""
    if task.is_plain(batch):
        return None
    if piece.samples < piece.of:
        return Refusing(_OF_PIECES, is_of_step=True)
    return task.gatherers(piece.shard) if task.gatherers else Discovering()


def backward(
    part: Contribution,
    batch: ShardedBatch,
    task: ShardTask,
    beside: Sequence[tuple[torch.Tensor, torch.Tensor]],
) -> None:
    """Run backward where it can begin and there is something to differentiate."""
    # A loss that depends on no parameter is legal in one shard (one without positives, say); that
    # none of the batch's shards gave a gradient is refused later, in `GradientRules.take`.
    if part.kind == "means" or not part.root.requires_grad:
        if beside:
            torch.autograd.backward([t for t, _ in beside], [g for _, g in beside])
        return
    # Divided before backward and not after the fold: with one shard these are the bits of a plain
    # loop, and gradients of low precision do not overflow on the way.
    divisor = 1.0 if part.kind == "sum" else task.divisor(batch, part.weight)
    if divisor:
        part.backward(divisor / task.scale, beside)


def code_of(part: Contribution) -> float:
    """Return a shard's entry among the table's weights: its weight, or a code below 0."""
    if part.kind == "means":
        return several(len(part.parts))
    return SUM if part.kind == "sum" else part.weight
