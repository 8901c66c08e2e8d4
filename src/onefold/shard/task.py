"""What all shards of a step have in common, and what the loss of each means for the step.

`ShardTask` also decides what a shard's loss means for the step: its divisors, its backward, and
what it may gather. `Microbatch` has samples of a shard that run at once.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, NamedTuple, Protocol

import torch

from onefold.core.batch import ShardedBatch
from onefold.core.gatherer import Gatherer, GatherRequest, Refusing
from onefold.core.mean import Contribution, LateWeight, known
from onefold.core.results import LATE, Gradients, ShardResult, total_weight
from onefold.errors import LossError
from onefold.exchange.reduction import GradientSend
from onefold.shard.gradients import add_gradients

__all__ = [
    "Digest",
    "GradientNotes",
    "LossFunction",
    "Microbatch",
    "ShardTask",
    "add_microbatch",
    "end_notes",
    "sum_of_digests",
]


LossFunction = Callable[[torch.nn.Module, Any], object]
"""Takes the model and one shard; see `onefold.core.mean.weigh` for what it may return."""


_OF_PIECES = (
    "onefold.gather (or onefold.SyncBatchNorm) was called in a microbatch of a shard, as "
    "microbatch has cut it: expected a whole shard, whose microbatches do not know each other. Use "
    "more shards instead of microbatch: each is smaller, and gather joins them all"
)


Digest = int | torch.Tensor
"""A signed 64-bit number; a tensor () int64 if it is computed on an accelerator."""
_HALF = 1 << 63


class GradientNotes(Protocol):
    """Sees the gradients of shards as they are taken from ``.grad``.

    One object sees all shards that a process computes in a step. For each shard or microbatch:
    `begin`, then `add` for each set of gradients, then `end`.
    """

    def begin(self, shard: int) -> None:
        """Start a shard, again if an earlier attempt failed."""

    def add(self, shard: int, numbers: Sequence[int], gradients: Gradients) -> None:
        """See gradients of a shard, with the numbers of their parameters."""

    def end(self, shard: int, total: torch.Tensor | None) -> Digest | None:
        """End a shard, given its part of the loss, () float64; return a digest for the step."""


@dataclass(frozen=True, slots=True)
class ShardTask:
    """What all shards of a step have in common."""

    loss: LossFunction
    batch: ShardedBatch
    """The batch of the step, with the shards of this process."""
    seed: int
    """The run's seed."""
    step: int
    """The number of the step."""
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
    notes: tuple[GradientNotes, ...] = ()
    """See the gradients of each shard; added by hooks."""
    gatherers: Callable[[int], Gatherer] | None = None
    """What `onefold.gather` does in each shard; None while no loss has been seen to call it."""

    send: Callable[[GradientSend], None] | None = None
    """Takes the gradients of a stage as soon as they are complete; None if shards keep them."""

    gathered: Callable[[], AbstractContextManager[Callable[[], None]]] | None = None
    """Surrounds a forward pass and its backward, and has parameters brought while they are needed;
    what it yields is called between the two. None where they are at hand."""

    @property
    def shards(self) -> int:
        """How many shards every batch is cut into."""
        return self.batch.shares.shards

    @property
    def is_plain(self) -> bool:
        """Whether one forward pass sees the whole batch, as in a plain loop."""
        fits = self.microbatch is None or self.batch.samples <= self.microbatch
        return self.shards == 1 and fits

    def of_one_divisor(self, part: Contribution) -> Contribution:
        """Combine the terms of a loss into one, where the whole batch's weights are known."""
        # Of the whole batch the own weights are already the divisors.
        divisors = self.divisors
        if self.is_plain:
            divisors = [each.known_weight for each in part.parts]
        if divisors is None:
            return part
        whole = part.combine(divisors)
        # A combined loss counts as a sum, and a sum is never skipped. A batch in which no term has
        # any weight must be: as a mean of weight 0 it leads to the verdict that there is nothing to
        # count.
        return whole if any(divisors) else replace(whole, kind="mean", weight=0.0)

    def backward(
        self, part: Contribution, beside: Sequence[tuple[torch.Tensor, torch.Tensor]]
    ) -> None:
        """Run backward where it can begin and there is something to differentiate."""
        # A loss that depends on no parameter is legal in one shard (one without positives, say);
        # that none of the batch's shards gave a gradient is refused later, in
        # `GradientRules.load_totals`.
        if part.kind == "means" or not part.root.requires_grad:
            if beside:
                torch.autograd.backward([t for t, _ in beside], [g for _, g in beside])
            return
        # Divided before backward and not after the fold: with one shard these are the bits of a
        # plain loop, and gradients of low precision do not overflow on the way.
        weight, plain = part.weight, self.is_plain
        if plain and isinstance(weight, LateWeight) and part.kind != "sum":
            # If it is 0, there is nothing to count, and nothing is updated.
            part.backward(weight.divisor(self.scale), beside)
            return
        # Not read unless it divides: on an accelerator this would wait for it.
        own = part.known_weight if plain else math.nan
        divisor = 1.0 if part.kind == "sum" else self.divisor(own)
        if divisor:
            part.backward(divisor / self.scale, beside)

    def divisor(self, weight: float) -> float:
        """What gradients are divided by in backward, before the whole batch's weight is known.

        That is the number of samples, the only divisor that every device knows before all forwards
        are done. Where one forward pass sees the whole batch, its ``weight`` is that of the batch.
        """
        return weight if self.is_plain else float(self.batch.samples)


class Microbatch(NamedTuple):
    """Samples of a shard that run at once: mostly all of them."""

    shard: int
    start: int
    stop: int
    of: int
    """Number of samples in the whole shard."""
    task: ShardTask
    where: str
    """Step and shard, for errors."""

    @property
    def samples(self) -> int:
        return self.stop - self.start

    @property
    def is_last(self) -> bool:
        """Whether nothing more of the shard follows."""
        return self.stop == self.of

    @property
    def gatherer(self) -> Gatherer | None:
        """What `onefold.gather` does in it; None if it sees the whole batch."""
        if self.task.is_plain:
            return None
        if self.samples < self.of:
            return Refusing(partial(LossError, _OF_PIECES))
        gatherers = self.task.gatherers
        return gatherers(self.shard) if gatherers else Refusing(GatherRequest)


def end_notes(task: ShardTask, shard: int, total: torch.Tensor | None) -> Digest | None:
    """End the notes of a shard or microbatch; return its digest."""
    digest: Digest | None = None
    for notes in task.notes:
        digest = sum_of_digests(digest, notes.end(shard, total))
    return digest


def sum_of_digests(one: Digest | None, other: Digest | None) -> Digest | None:
    """Add the digests of two parts of a shard, modulo 2 ** 64."""
    if one is None or other is None:
        return other if one is None else one
    if isinstance(one, int) and isinstance(other, int):
        return (one + other + _HALF) % (2 * _HALF) - _HALF
    return one + other


def add_microbatch(result: ShardResult, microbatch: ShardResult, step: int) -> ShardResult:
    """Add the result of a shard's next microbatch; the memory of the first one takes the sum."""
    totals = [each.total for each in (result, microbatch) if each.total is not None]
    # None of one microbatch is refused by the values of the other.
    values, others = (
        result.values or microbatch.values,
        microbatch.values if result.values else None,
    )
    return ShardResult(
        add_gradients(result.gradients, microbatch.gradients),
        totals[0] + totals[1] if len(totals) == 2 else None,
        _weight_of_both(result.weight, microbatch.weight, step),
        values=values and values.plus(others, f"step {step}"),
        given=[one or other for one, other in zip(result.given, microbatch.given, strict=True)],
        digest=sum_of_digests(result.digest, microbatch.digest),
    )


def _weight_of_both(
    one: float | LateWeight, other: float | LateWeight, step: int
) -> float | LateWeight:
    if isinstance(one, LateWeight):
        return one.then(lambda known_one: _added(known_one, known(other), step))
    if isinstance(other, LateWeight):
        return other.then(lambda known_other: _added(one, known_other, step))
    return _added(one, other, step)


def _added(one: float, other: float, step: int) -> float:
    found = total_weight([one, other], [1, 1], step)
    # Kinds are alike, or they would have been refused: a code stands for itself.
    return LATE if found.late else one if one < 0 else found.value
