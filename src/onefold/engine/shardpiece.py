"""Pieces in which a shard runs, mostly a single one, and how their results become the shard's."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch

from onefold.core.values import ShardValues
from onefold.core.weights_of_step import LATE, total_weight
from onefold.engine.gradients import Gradients, add_gradients

__all__ = ["PieceResult", "ShardPiece"]


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
