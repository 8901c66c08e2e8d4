"""The result of one shard in a step: a value that knows nothing of devices, boards or exchanges."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from onefold.core.values import ShardValues

__all__ = ["ChangedBuffers", "ShardResult"]


@dataclass(frozen=True, slots=True)
class ChangedBuffers:
    """The buffers that a shard changed, and their values afterwards."""

    indices: Sequence[int]
    """Numbers of the changed buffers, in the order of their layout."""
    sections: Sequence[torch.Tensor]
    """Values of all buffers, changed or not: one flat tensor for each section of their layout."""


@dataclass(frozen=True, slots=True)
class ShardResult:
    """The result of one shard.

    It depends on the parameters, the buffers, the shard's samples, and (seed, step, shard), and on
    nothing else: the same call on another device, or later, returns the same bits.
    """

    gradients: list[torch.Tensor | None]
    """One for each trained parameter, shaped like it; None where the shard computed none. Empty
    if they have been handed over stage by stage."""
    total: torch.Tensor | None
    """() float64: the shard's part of the loss; None until a loss of several terms has divisors."""
    weight: float
    """The shard's part of the divisor, or a code below 0: see `onefold.core.weights_of_step`."""
    buffers: ChangedBuffers | None
    """The buffers that the shard changed; None if it changed none."""
    values: ShardValues | None = None
    """What the loss returned beside itself, if anything."""

    left_out: int = 0
    """How many of the shard's samples ``collate`` has left out."""

    given: Sequence[bool] = ()
    """What `gave` returns of gradients that have been handed over."""

    @property
    def gave(self) -> Sequence[bool]:
        """For each trained parameter, whether the shard computed a gradient for it."""
        return self.given or [gradient is not None for gradient in self.gradients]
