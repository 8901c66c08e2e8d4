"""What a shard's loss means for the step: its divisors, its backward, and what it may gather."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import replace

import torch

from onefold.core.batch import ShardedBatch
from onefold.core.gathering import Discovering, Gatherer, Refusing
from onefold.core.mean import Contribution
from onefold.core.weights_of_step import SUM, several
from onefold.engine.shardtask import ShardPiece, ShardTask
from onefold.errors import LossError

__all__ = [
    "added_weights",
    "backward",
    "code_of",
    "gatherer_of",
    "kinds_and_weights",
    "of_one_divisor",
    "refuse_uneven",
    "without_graph",
]

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
    # none of the batch's shards gave a gradient is refused later, in `Engine._apply`.
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
    """Return a shard's entry among the board's weights: its weight, or a code below 0."""
    if part.kind == "means":
        return several(len(part.parts))
    return SUM if part.kind == "sum" else part.weight
