"""Decides what becomes of a step: once, and alike on every device."""

from __future__ import annotations

from dataclasses import dataclass

from onefold.core.head import Said
from onefold.core.weights_of_step import StepWeight

__all__ = ["Verdict", "verdict_of"]


@dataclass(frozen=True, slots=True)
class Verdict:
    """What becomes of a step."""

    updates: bool
    """Whether the parameters are updated; if not, the batch held nothing to count."""
    stops: bool
    """Whether a device was asked to stop: the run then ends after this step, once it is saved."""


def verdict_of(weight: StepWeight, said: Said) -> Verdict:
    """Reach the verdict on a step.

    Args:
        weight: the whole batch's, the same on all devices.
        said: what all devices reported when the step began.
    """
    # From numbers that all devices have in common, and so without another exchange.
    return Verdict(updates=weight.value > 0, stops=said.stop)
