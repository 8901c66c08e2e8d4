"""The result of a shard in a step: gradients, its part of the loss, its weight."""

from __future__ import annotations

import math
import operator
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple

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
    """Separate a loss from the metrics and outputs that were returned with it.

    Args:
        result: return value of the user's loss.
        what: name of the loss in errors, such as ``the loss of step 7, shard 3``.

    Returns:
        The loss, and metrics and outputs by name; both empty if the result is only a loss.

    Raises:
        LossError: the result is a dict, or a tuple with other parts.
    """
    # Check for the common types first, because isinstance(x, Mapping) is far slower.
    if isinstance(result, torch.Tensor) or not isinstance(result, tuple | Mapping):
        return result, {}, {}
    if isinstance(result, Mapping):
        raise LossError(
            f"{what}: expected a loss, or {_EXAMPLE} for a loss with metrics, but got only a dict "
            f"of {list(result)}. Return the loss tensor first, as in {_EXAMPLE}"
        )
    if len(result) in (2, 3) and all(isinstance(part, Mapping) for part in result[1:]):
        loss, values, *outputs = result
        return loss, values, outputs[0] if outputs else {}
    kinds = ", ".join(type(part).__name__ for part in result)
    raise LossError(
        f"{what}: expected a loss, or {_EXAMPLE} for a loss with metrics, or (loss, metrics, "
        f"outputs) to add rows of samples, but got a tuple of ({kinds}). Return only the loss, or "
        f"put the other values into a dict with names"
    )


@dataclass(frozen=True, slots=True)
class ChangedBuffers:
    """The buffers that a shard changed, and their values afterwards."""

    indices: Sequence[int]
    """Numbers of the changed buffers, in layout order."""
    flat: FlatTensors
    """Values of all buffers, changed or not."""


class ShardResult(NamedTuple):
    """The result of one shard, or of some of its microbatches.

    It depends only on the parameters, the buffers, the shard's samples, and (seed, step, shard):
    the same call on another device, or later, returns the same bits.
    """

    gradients: list[torch.Tensor | None]
    """Gradient of each trained parameter, in its shape; None if the shard computed none. Empty if
    they were sent stage by stage."""
    total: torch.Tensor | None
    """() float64: the shard's part of the loss; None until a loss of several terms has
    denominators."""
    weight: float | LateWeight
    """The shard's part of the denominator, or a code below 0: see `onefold.core.values`."""
    buffers: ChangedBuffers | None = None
    """Buffers that the shard changed; None if it changed none."""
    values: ShardValues | None = None
    """Metrics and outputs that the loss returned, if any."""

    left_out: int = 0
    """Number of the shard's samples that ``collate`` dropped."""

    given: Sequence[bool] = ()
    """Value of `gave` for gradients that were sent stage by stage."""

    digest: int | torch.Tensor | None = None
    """Digest of the gradient, () int64; None unless `GradientNotes` request one."""

    @property
    def known_weight(self) -> float:
        """The weight; on an accelerator this may block."""
        return known(self.weight)

    @property
    def gave(self) -> Sequence[bool]:
        """Whether the shard computed a gradient, for each trained parameter."""
        return self.given or [gradient is not None for gradient in self.gradients]


Gradients = list[torch.Tensor | None]
"""One tensor per trained parameter, in its shape, in the dtype of gradient sums; None if a shard
computed no gradient."""


SUM = -1.0


GATHERS = -0.5
"""Not an integer, because the codes of terms are integers."""


LATE = -0.25


@dataclass(frozen=True, slots=True)
class StepWeight:
    """Denominator of the totals of a step."""

    value: float
    """Sum of the shards' weights; 1 if the loss is not divided, NaN if it has several terms."""
    divided: bool = True
    """Whether the loss is divided."""
    terms: int = 1
    """Number of terms with a denominator each; if more than 1, nothing has been computed yet."""
    gathers: bool = False
    """Whether a shard requested the tensors of the others; then nothing has been computed yet."""
    late: bool = False
    """Whether a shard sent a stage too early; then the sums are incomplete."""


def code_of(part: Contribution) -> float | LateWeight:
    """Return a shard's entry among the table's weights: its weight, or a code below 0."""
    if part.kind == "means":
        # A single term gives SUM - 1, so no code equals SUM itself.
        return SUM - len(part.parts)
    return SUM if part.kind == "sum" else part.weight


def total_weight(weights: Sequence[float], sizes: Sequence[int], step: int) -> StepWeight:
    """Add up the shards' weights in the order of the fold.

    Args:
        weights: (V,) float64 weights of the shards; 0 for empty shards.
        sizes: (V,) number of samples in each shard.
        step: step number, for errors.

    Raises:
        LossError: some shards return divided losses and others do not.
    """
    # Empty shards never ran, so they have no code. In the sum they count as 0, at their position in
    # the tree.
    filled = [weight for weight, size in zip(weights, sizes, strict=True) if size]
    # Before comparing kinds, because the result of a shard that gathers is not known yet.
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
            f"the shards of step {step} return different kinds of losses: {kinds}. Return the same "
            f"kind for every shard, even if it has nothing to count"
        )
    if least == SUM:
        return StepWeight(1.0, divided=False)
    return StepWeight(math.nan, terms=int(-1.0 - least))


def _kind(weight: float) -> str:
    if weight >= 0:
        return "a mean"
    return "onefold.Sum" if weight == SUM else f"a sum of {int(-1.0 - weight)} terms"
