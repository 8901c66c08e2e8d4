"""Which average of the model a run keeps, and how much weight each value has in it. Pure."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from onefold.core.numbers import check_whole

__all__ = ["AverageRule"]


@dataclass(frozen=True, slots=True)
class AverageRule:
    """How an average follows the values of the model."""

    decay: float | None
    """How much of an exponential average stays in each update; None for the plain mean."""
    every: int = 1
    """After how many steps the average is updated each time."""
    after: str = ""
    """The loss whose steps it follows; empty for all steps."""

    def __post_init__(self) -> None:
        check_whole("every", self.every, least=1)
        if self.decay is None:
            return
        if isinstance(self.decay, bool) or not isinstance(self.decay, int | float):
            raise TypeError(f"expected decay to be a number, got {self.decay!r}")
        if not 0 <= self.decay < 1:
            raise ValueError(f"expected decay to be at least 0 and less than 1, got {self.decay}")

    @classmethod
    def chosen(cls, *, decay: float | None, mean: bool, every: int, after: str = "") -> AverageRule:
        """The rule of which a user named the kind.

        Raises:
            TypeError, ValueError: both kinds are named or none, or a number is out of range.
        """
        if not isinstance(mean, bool):
            raise TypeError(f"expected mean to be True or False, got {mean!r}")
        if mean == (decay is not None):
            raise ValueError(
                f"expected either decay, such as decay=0.999 for an exponential average, or "
                f"mean=True for the plain mean, got decay={decay} and mean={mean}"
            )
        return cls(decay, every, after)

    @property
    def words(self) -> str:
        """The arguments that choose it.

        >>> AverageRule(0.99).words
        'decay=0.99, every=1'
        """
        kind = "mean=True" if self.decay is None else f"decay={float(self.decay)}"
        after = f", after={self.after!r}" if self.after else ""
        return f"{kind}, every={self.every}{after}"

    def kept(self, update: int) -> float:
        """How much of the average stays in an update, between 0 and 1.

        A warm-up: the values at the beginning soon have little weight, whatever the decay.

        Args:
            update: number of the update, counted from 1.

        >>> [round(AverageRule(0.9).kept(n), 3) for n in (1, 10, 100)]
        [0.182, 0.55, 0.9]
        >>> AverageRule(None).kept(4)
        0.75
        """
        if self.decay is None:
            return 1.0 - 1.0 / update
        return min(self.decay, (1.0 + update) / (10.0 + update))

    def to_json(self, steps: int) -> dict[str, Any]:
        """Describe it in a checkpoint, with the number of steps that it has followed."""
        # As a float also where the user wrote decay=0.
        decay = None if self.decay is None else float(self.decay)
        return {"decay": decay, "every": self.every, "after": self.after, "steps": steps}

    @classmethod
    def from_json(cls, saved: Mapping[str, Any]) -> AverageRule:
        """Read what `to_json` has written, once that has been checked."""
        return cls(saved["decay"], saved["every"], saved.get("after", ""))
