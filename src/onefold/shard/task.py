"""The settings that all shards of a step share, and the loss of each shard.

`ShardTask` also turns a shard's loss into its part of the batch's loss: it chooses the
denominators, runs backward, and selects what `onefold.gather` does. `Microbatch` describes samples
of a shard that run in one forward pass.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
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


LossFunction = Callable[[Any, Any], object]
"""Takes the model and one shard. `onefold.core.mean.weigh` lists the valid return values."""


_OF_PIECES = (
    "onefold.gather (or onefold.SyncBatchNorm) was called in a microbatch, but requires a whole "
    "shard: microbatches run one after another and cannot exchange values. Use more shards instead "
    "of microbatch: each shard is smaller, and gather joins all of them"
)


Digest = int | torch.Tensor
"""A signed 64-bit number; a tensor () int64 if it is computed on an accelerator."""
_HALF = 1 << 63


class GradientNotes(Protocol):
    """Observes the gradients of shards as they are taken from ``.grad``.

    One object observes all shards that a process computes in a step. Per shard or microbatch, the
    order of calls is `begin`, `add` for each set of gradients, `end`.
    """

    def begin(self, shard: int) -> None:
        """Start a shard, or restart it after a failed attempt."""

    def add(self, shard: int, numbers: Sequence[int], gradients: Gradients) -> None:
        """Observe gradients of a shard; ``numbers`` are the numbers of their parameters."""

    def end(self, shard: int, total: torch.Tensor | None) -> Digest | None:
        """End a shard with its part of the loss, () float64; return a digest for the step."""


@dataclass(frozen=True, slots=True)
class ShardTask:
    """Settings that all shards of a step share."""

    loss: LossFunction
    batch: ShardedBatch
    """The step's batch, with the samples of this process's shards."""
    seed: int
    """The run's seed."""
    step: int
    """Step number."""
    modes: bytes
    """Modes of the modules, restored after each of several shards."""
    trainable: Sequence[bool]
    """Whether each parameter requires a gradient; restored after each of several shards."""
    scale: float = 1.0
    """Factor of the loss before backward: a power of two."""
    run_checks: bool = False
    """Whether to run the costly checks."""
    divisors: Sequence[float] | None = None
    """Denominator of each term of the loss; None until known, or if the loss has a single term."""
    microbatch: int | None = None
    """Maximum number of samples per forward pass; None for the whole shard."""
    left_out: Sequence[int] = ()
    """Numbers of trained parameters whose gradients are dropped because this step skips them."""
    notes: tuple[GradientNotes, ...] = ()
    """Observers of each shard's gradients, registered by hooks."""
    gatherers: Callable[[int], Gatherer] | None = None
    """Makes the `Gatherer` of a shard for `onefold.gather`; None until a loss calls it."""

    send: Callable[[GradientSend], None] | None = None
    """Sends the gradients of a stage as soon as they are complete; None if shards keep them."""

    gathered: Callable[[], AbstractContextManager[Callable[[], None]]] | None = None
    """Context for a forward pass and its backward, which gathers parameters while they are needed.
    The yielded function must be called between the two. None if all parameters are resident."""

    shards: int = field(init=False)
    """Number of shards per batch."""
    is_plain: bool = field(init=False)
    """Whether one forward pass sees the whole batch, as in a plain loop."""

    def __post_init__(self) -> None:
        # Computed once, because each shard reads them several times.
        shards = self.batch.shares.shards
        fits = self.microbatch is None or self.batch.samples <= self.microbatch
        object.__setattr__(self, "shards", shards)
        object.__setattr__(self, "is_plain", shards == 1 and fits)

    def of_one_divisor(self, part: Contribution) -> Contribution:
        """Combine the terms of a loss into one if the denominators are known."""
        # In one forward pass over the whole batch, the terms' own weights are the denominators.
        divisors = self.divisors
        if self.is_plain:
            divisors = [each.known_weight for each in part.parts]
        if divisors is None:
            return part
        whole = part.combine(divisors)
        # Keep kind "mean" if all denominators are 0: a combined loss has kind "sum", which is never
        # skipped, but a batch without any weight must lead to the verdict "nothing to count".
        return whole if any(divisors) else whole._replace(kind="mean", weight=0.0)

    def backward(
        self, part: Contribution, beside: Sequence[tuple[torch.Tensor, torch.Tensor]]
    ) -> None:
        """Run backward, unless denominators are missing or nothing requires a gradient."""
        # The loss of one shard may depend on no parameter (a shard without positives, say).
        # `GradientRules.load_totals` raises later if no shard of the batch gave a gradient.
        if part.kind == "means" or not part.root.requires_grad:
            if beside:
                torch.autograd.backward([t for t, _ in beside], [g for _, g in beside])
            return
        # Divide before backward, not after the fold: with one shard this gives the bits of a plain
        # loop, and low-precision gradients do not overflow.
        weight, plain = part.weight, self.is_plain
        if plain and isinstance(weight, LateWeight) and part.kind != "sum":
            # A weight of 0 means that there is nothing to count; the step then updates nothing.
            part.backward(weight.divisor(self.scale), beside)
            return
        # Read the weight only if it divides: reading it blocks on the accelerator.
        own = part.known_weight if plain else math.nan
        divisor = 1.0 if part.kind == "sum" else self.divisor(own)
        if divisor:
            part.backward(divisor / self.scale, beside)

    def divisor(self, weight: float) -> float:
        """Return the denominator for backward, before the weight of the whole batch is known.

        This is the number of samples, the only denominator that every device knows before all
        forward passes end. If one forward pass sees the whole batch, its ``weight`` is the batch's.
        """
        return weight if self.is_plain else float(self.batch.samples)


class Microbatch(NamedTuple):
    """Samples of a shard that run in one forward pass: usually all of them."""

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
        """Whether this is the last microbatch of the shard."""
        return self.stop == self.of

    @property
    def gatherer(self) -> Gatherer | None:
        """Implements `onefold.gather` in this microbatch; None if it sees the whole batch."""
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
    """Add the result of a shard's next microbatch, in place, to the gradients of ``result``."""
    totals = [each.total for each in (result, microbatch) if each.total is not None]
    # If only one of the two has values, `plus` raises.
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
    # Both have the same kind; `total_weight` refused others. A negative weight is the kind's code.
    return LATE if found.late else one if one < 0 else found.value
