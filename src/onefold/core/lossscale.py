"""The factor by which losses of float16 are multiplied before backward. Pure.

Gradients below 6e-8 are 0 in float16. Multiplied by a power of two, a loss has gradients that
survive, and dividing by it again rounds nothing (Micikevicius et al. 2018, Mixed Precision
Training).
"""

from __future__ import annotations

from dataclasses import dataclass

__all__ = ["LossScale"]

_FIRST = 2.0**16
_LEAST = 1.0
_MOST = 2.0**32
"""Gradients are added up in float32, which leaves room for it."""
_GOOD_STEPS = 2000
"""After so many without an overflow, twice the scale is tried."""


@dataclass(frozen=True, slots=True)
class LossScale:
    """A power of two, and how long it has been good.

    >>> LossScale().after(overflow=True)
    LossScale(value=32768.0, good_steps=0)
    """

    value: float = _FIRST
    good_steps: int = 0

    def after(self, *, overflow: bool) -> LossScale:
        """The scale of the step that follows one with or without an overflow."""
        if overflow:
            return LossScale(max(self.value / 2, _LEAST))
        if self.good_steps + 1 < _GOOD_STEPS:
            return LossScale(self.value, self.good_steps + 1)
        return LossScale(min(self.value * 2, _MOST))

    @property
    def can_shrink(self) -> bool:
        """Whether an overflow may be the scale's doing."""
        return self.value > _LEAST
