"""Which checkpoints of a run are kept, and what a user sees of one."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from onefold.checkpoint.folder import (
    Best,
)

__all__ = ["Checkpoint", "Keeping"]


@dataclass(frozen=True, slots=True)
class Checkpoint:
    """A checkpoint that a run was resumed from."""

    folder: Path
    """Where it lies."""
    step: int
    """How many steps were done."""
    epoch: int
    """The epoch in which the run goes on."""
    scores: Mapping[str, float]
    """The scores that `Trainer.save` was given."""
    extra: Any
    """The extra data that `Trainer.save` was given."""


@dataclass(frozen=True, slots=True)
class Keeping:
    """The rule by which later saves decide which checkpoints of a run stay."""

    newest: int | None
    """How many of the newest stay; None keeps this one for good."""
    best: str | None = None
    """The rule by which one more stays, in the form of `Best.read`."""
    scores: Mapping[str, float] = field(default_factory=dict)
    """The scores of this checkpoint."""

    @classmethod
    def checked(cls, newest: int | None, best: str | None, scores: Mapping[str, float]) -> Keeping:
        """Check what a user gives, and make the rule from it.

        Raises:
            TypeError, ValueError: an argument is of a wrong type or value.
        """
        if newest is not None and (isinstance(newest, bool) or not isinstance(newest, int)):
            raise TypeError(f"expected keep to be a whole number or None, got {newest!r}")
        if newest is not None and newest < 1:
            raise ValueError(f"expected keep of at least 1, got {newest}")
        for name, value in scores.items():
            if not isinstance(name, str) or not isinstance(value, int | float):
                raise TypeError(f"expected scores to be numbers by name, got {name!r}: {value!r}")
        if best is not None and Best.read(best).score not in scores:
            raise ValueError(
                f"best is {best!r}: expected a score of that name among scores, which has "
                f"{list(scores)}"
            )
        return cls(newest, best, {name: float(value) for name, value in scores.items()})
