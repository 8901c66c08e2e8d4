"""What one update came to."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field

import torch

from onefold.core.fold import fold_shards
from onefold.engine.engine import Outcome
from onefold.watch.timing import PhaseSeconds, Span

__all__ = ["Step"]


@dataclass(frozen=True, slots=True)
class Step:
    """What one update came to."""

    number: int
    """Counts the updates of the run, from 1."""
    samples: int
    """Of the whole batch."""
    epoch: int
    """Which pass over the data the batch belongs to."""
    _outcome: Outcome = field(repr=False)
    _spans: Sequence[Span] = field(repr=False)

    @property
    def loss(self) -> torch.Tensor:
        """() float64: sum of totals over sum of weights, before the update.

        Computed when it is asked for; on a GPU nothing waits for it until then.
        """
        total = fold_shards(list(self._outcome.totals.unbind()), torch.add)
        return total / self._outcome.weight if self._outcome.weight else total * math.nan

    @property
    def skipped(self) -> bool:
        """Whether the parameters were left alone, the sum of weights being 0."""
        return not self._outcome.verdict.updates

    @property
    def seconds(self) -> PhaseSeconds:
        """Where the time went: data, forward, backward, exchange, update.

        On this process's first device, by its own clock. Added up when it is asked for; on a GPU
        only that waits for the step to be done.
        """
        return PhaseSeconds.of(self._spans)
