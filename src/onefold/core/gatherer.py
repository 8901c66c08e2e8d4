"""The gatherer that handles `onefold.gather` in a shard, and its place in the process."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
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
    """A tensor of all shards, and the slice of this shard's rows."""

    whole: torch.Tensor  # (N, ...)
    own: slice


class GatherRequest(BaseException):
    """Ends a shard whose step does not know yet that its loss gathers; never reaches the script."""

    # Derive from BaseException, because a loss may catch every Exception.


class Gatherer(ABC):
    """Implements `gather` in one shard, from the call of its loss to the end of its backward."""

    is_of_step = True
    """Whether the shard belongs to a step, and not to an evaluation."""
    takes_turns = False
    """Whether other shards compute in between, so that its time is measured elsewhere."""
    sees_batch = False
    """Whether the loss itself gathered: its result may depend on more than the shard's samples."""

    @abstractmethod
    def gather(self, tensor: torch.Tensor) -> GatheredRows:
        """Concatenate a tensor of this shard with those of all other shards."""

    def end_forward(self, terms: Sequence[tuple[str, float]]) -> Sequence[float] | None:
        """Record that the loss has returned; called before backward.

        Args:
            terms: kind and weight of each term of the loss.

        Returns:
            The denominators of several terms, if they became known while the loss was computed.
        """
        return None

    @property
    def roots(self) -> list[tuple[torch.Tensor, torch.Tensor]]:
        """Start tensors of backward in addition to the loss, with their gradients."""
        return []


class Refusing(Gatherer):
    """Raises an error instead of gathering.

    Args:
        error: makes the exception: a `LossError`, or `GatherRequest`, which restarts the step as
            one that joins shards.
        is_of_step: whether the shard belongs to a step.
    """

    def __init__(self, error: Callable[[], BaseException], *, is_of_step: bool = True) -> None:
        self._error = error
        self.is_of_step = is_of_step

    def gather(self, tensor: torch.Tensor) -> GatheredRows:
        raise self._error()


class _Place:
    """Holds the current gatherer."""

    gatherer: Gatherer | None = None


GATHERER = _Place()
"""The gatherer of this process, or of the simulated device that is running."""


class gathering:  # noqa: N801 (used like a function)
    """Make `gather` use this gatherer inside the context, and none afterwards."""

    __slots__ = ("_gatherer",)

    def __init__(self, gatherer: Gatherer | None) -> None:
        self._gatherer = gatherer

    def __enter__(self) -> None:
        GATHERER.gatherer = self._gatherer

    def __exit__(self, *_: object) -> None:
        # Do not restore the previous one: shards that take turns end in another order than they
        # began.
        GATHERER.gatherer = None


def joins() -> bool:
    """Return whether a shard of a step is being computed that is not the whole batch."""
    return GATHERER.gatherer is not None and GATHERER.gatherer.is_of_step
