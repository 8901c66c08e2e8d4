"""What a shard gives to its step: gradients, its part of the loss, its weight."""

from __future__ import annotations

import math
import operator
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

from onefold.core.flat import FlatTensors
from onefold.core.fold import fold_shards
from onefold.core.mean import Contribution, LateWeight, known
from onefold.errors import LossError

if TYPE_CHECKING:
    from onefold.core.values import ShardValues

__all__ = [
    "GATHERS",
    "LATE",
    "SUM",
    "ChangedBuffers",
    "Gradients",
    "ShardResult",
    "StepWeight",
    "code_of",
    "split",
    "total_weight",
]


_EXAMPLE = '(loss, {"accuracy": ...})'


def split(result: object, what: str) -> tuple[object, Mapping[str, object], Mapping[str, object]]:
    """Tell a loss from the values and the outputs beside it.

    Args:
        result: what the user's loss returned.
        what: what the loss is called in errors, such as ``the loss of step 7, shard 3``.

    Returns:
        The loss, and the values and outputs by name; none where the result is the loss alone.

    Raises:
        LossError: the result is a dict, or a tuple of something else.
    """
    # Nearly all are tensors, and to tell whether something is a mapping takes far longer.
    if isinstance(result, torch.Tensor) or not isinstance(result, tuple | Mapping):
        return result, {}, {}
    if isinstance(result, Mapping):
        raise LossError(
            f"{what}: expected a loss, or {_EXAMPLE} for values beside it, got a dict of "
            f"{list(result)} alone. Return the tensor itself first, as in {_EXAMPLE}"
        )
    if len(result) in (2, 3) and all(isinstance(part, Mapping) for part in result[1:]):
        loss, values, *outputs = result
        return loss, values, outputs[0] if outputs else {}
    kinds = ", ".join(type(part).__name__ for part in result)
    raise LossError(
        f"{what}: expected a loss, or {_EXAMPLE} for values beside it, or (loss, values, outputs) "
        f"for rows of samples as well, got a tuple of "
        f"({kinds}). Return the loss alone, or give what else is to be reported a name in a dict"
    )


@dataclass(frozen=True, slots=True)
class ChangedBuffers:
    """The buffers that a shard changed, and their values afterwards."""

    indices: Sequence[int]
    """Numbers of the changed buffers, in the order of their layout."""
    flat: FlatTensors
    """Values of all buffers, changed or not."""


@dataclass(frozen=True, slots=True)
class ShardResult:
    """The result of one shard, or of some of its microbatches.

    It depends on the parameters, the buffers, the shard's samples, and (seed, step, shard), and on
    nothing else: the same call on another device, or later, returns the same bits.
    """

    gradients: list[torch.Tensor | None]
    """One for each trained parameter, shaped like it; None where the shard computed none. Empty
    if they have been handed over stage by stage."""
    total: torch.Tensor | None
    """() float64: the shard's part of the loss; None until a loss of several terms has divisors."""
    weight: float | LateWeight
    """The shard's part of the divisor, or a code below 0: see `onefold.core.values`."""
    buffers: ChangedBuffers | None = None
    """The buffers that the shard changed; None if it changed none."""
    values: ShardValues | None = None
    """What the loss returned beside itself, if anything."""

    left_out: int = 0
    """How many of the shard's samples ``collate`` has left out."""

    given: Sequence[bool] = ()
    """What `gave` returns of gradients that have been handed over."""

    digest: int | torch.Tensor | None = None
    """Digest of the gradient, () int64; None without `GradientNotes` that make one."""

    @property
    def known_weight(self) -> float:
        """The weight; on an accelerator this may wait for it."""
        return known(self.weight)

    @property
    def gave(self) -> Sequence[bool]:
        """For each trained parameter, whether the shard computed a gradient for it."""
        return self.given or [gradient is not None for gradient in self.gradients]


Gradients = list[torch.Tensor | None]
"""One tensor for each trained parameter, of its shape, in the dtype in which they are added up;
None where a shard gave none."""


SUM = -1.0


GATHERS = -0.5
"""No whole number, as the codes of terms are."""


LATE = -0.25


@dataclass(frozen=True, slots=True)
class StepWeight:
    """What the totals of a step are divided by."""

    value: float
    """The sum of the shards' weights; 1 if the loss is not divided, NaN if it has several terms."""
    divided: bool = True
    """Whether the loss is divided at all."""
    terms: int = 1
    """Number of terms with a divisor each; if there are several, nothing has been computed yet."""
    gathers: bool = False
    """Whether a shard has asked for the tensors of the others; then nothing has been computed."""
    late: bool = False
    """Whether a shard has handed over a stage too early; then sums are not complete."""


def code_of(part: Contribution) -> float | LateWeight:
    """A shard's entry among the table's weights: its weight, or a code below 0."""
    if part.kind == "means":
        # One below SUM for a single term, so that no code is SUM itself.
        return SUM - len(part.parts)
    return SUM if part.kind == "sum" else part.weight


def total_weight(weights: Sequence[float], sizes: Sequence[int], step: int) -> StepWeight:
    """Add up the shards' weights in the order of the fold.

    Args:
        weights: (V,) float64 of the shards; 0 for empty ones.
        sizes: (V,) number of samples in each shard.
        step: number of the step, for errors.

    Raises:
        LossError: some shards' losses are divided and others' are not.
    """
    # Empty shards never ran, so they have no opinion on the kind of the loss. In a sum they count
    # as 0, in their place in the tree.
    filled = [weight for weight, size in zip(weights, sizes, strict=True) if size]
    # Before kinds are compared: what a shard that gathers will return is not known yet.
    if GATHERS in filled:
        return StepWeight(math.nan, gathers=True)
    if LATE in filled:
        return StepWeight(math.nan, late=True)
    least = min(filled)
    if least >= 0:
        return StepWeight(fold_shards(list(weights), operator.add))
    if max(filled) != least:
        kinds = ", ".join(sorted({_kind(weight) for weight in filled}))
        raise LossError(
            f"the loss of step {step} is of several kinds: {kinds}. Expected the same kind for "
            f"every shard, also for one in which there is nothing to count"
        )
    if least == SUM:
        return StepWeight(1.0, divided=False)
    return StepWeight(math.nan, terms=int(-1.0 - least))


def _kind(weight: float) -> str:
    if weight >= 0:
        return "a mean"
    return "onefold.Sum" if weight == SUM else f"a sum of {int(-1.0 - weight)} terms"
