"""Who answers `onefold.gather` in a shard, and that shards may be asked to gather."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import NamedTuple

import torch

__all__ = [
    "GATHERER",
    "GatherRequest",
    "GatheredRows",
    "Gatherer",
    "Refusing",
    "gathering",
    "joins",
]


class GatheredRows(NamedTuple):
    """A tensor of all shards, and which of its rows are this shard's."""

    whole: torch.Tensor  # (N, ...)
    own: slice


class GatherRequest(BaseException):
    """Ends a shard whose step does not know yet that its loss gathers; never reaches a script."""

    # Not an Exception: a loss may well catch those.


class Gatherer(ABC):
    """What `gather` does in one shard, from the call of its loss to the end of its backward."""

    is_of_step = True
    """Whether the shard is one of a step, and not of an evaluation."""
    takes_turns = False
    """Whether other shards compute in between, so that its time is measured elsewhere."""
    sees_batch = False
    """Whether the loss itself has gathered: what it returns may be of more than its own samples."""

    @abstractmethod
    def gather(self, tensor: torch.Tensor) -> GatheredRows:
        """Join a tensor of this shard with those of all others."""

    def end_forward(self, terms: Sequence[tuple[str, float]]) -> Sequence[float] | None:
        """Note that the loss has returned; called before backward.

        Args:
            terms: kind and weight of each term of the loss.

        Returns:
            The divisors of several terms, if they became known while the loss was computed.
        """
        return None

    @property
    def roots(self) -> list[tuple[torch.Tensor, torch.Tensor]]:
        """Tensors from which backward starts beside the loss, with their gradients."""
        return []


class Refusing(Gatherer):
    """Refuses to gather.

    Args:
        error: makes the exception: a `LossError`, or `GatherRequest`, which starts the step again
            as one that joins shards.
        is_of_step: whether the shard is one of a step.
    """

    def __init__(self, error: Callable[[], BaseException], *, is_of_step: bool = True) -> None:
        self._error = error
        self.is_of_step = is_of_step

    def gather(self, tensor: torch.Tensor) -> GatheredRows:
        raise self._error()


class _Place:
    """Where the gatherer is."""

    gatherer: Gatherer | None = None


GATHERER = _Place()
"""Of this process, or of the simulated device that goes on."""


@contextmanager
def gathering(gatherer: Gatherer | None) -> Iterator[None]:
    """Have `gather` find this gatherer inside the context, and none after it."""
    GATHERER.gatherer = gatherer
    try:
        yield
    finally:
        # Not the one before: shards that take turns do not end in the order in which they began.
        GATHERER.gatherer = None


def joins() -> bool:
    """Whether a shard of a step is being computed that is not the whole batch."""
    return GATHERER.gatherer is not None and GATHERER.gatherer.is_of_step
