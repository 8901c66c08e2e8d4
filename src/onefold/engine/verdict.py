"""What becomes of a step, decided once, and alike on every device."""

from __future__ import annotations

from dataclasses import dataclass

from onefold.core.head import Said
from onefold.core.weights_of_step import StepWeight

__all__ = ["Verdict", "verdict_of"]


@dataclass(frozen=True, slots=True)
class Verdict:
    """What becomes of a step."""

    updates: bool
    """The parameters are updated; else the step is skipped, as there was nothing to count."""
    stops: bool
    """Some device has been asked to stop: the run ends after this step, once it has been saved."""


def verdict_of(weight: StepWeight, said: Said) -> Verdict:
    """The verdict on a step.

    Args:
        weight: of the whole batch, the same on all devices.
        said: by all devices when the step began.
    """
    return Verdict(updates=weight.value > 0, stops=said.stop)
