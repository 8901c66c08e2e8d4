"""What stays of the checkpoints of a run, and what a user holds of one."""

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
    """What a run goes on from."""

    folder: Path
    """Where it lies."""
    step: int
    """Steps that were done."""
    epoch: int
    """The epoch that the run goes on in."""
    scores: Mapping[str, float]
    """Given to `Trainer.save`."""
    extra: Any
    """Given to `Trainer.save`."""


@dataclass(frozen=True, slots=True)
class Keeping:
    """What tells later which checkpoints of a run stay in their directory."""

    newest: int | None
    """How many of the newest stay; with None, this one stays for good."""
    best: str | None = None
    """The rule by which another one stays, as `Best.read` has it."""
    scores: Mapping[str, float] = field(default_factory=dict)
    """Of this checkpoint."""

    @classmethod
    def checked(cls, newest: int | None, best: str | None, scores: Mapping[str, float]) -> Keeping:
        """From what a user gives.

        Raises:
            TypeError, ValueError: it is not usable.
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
