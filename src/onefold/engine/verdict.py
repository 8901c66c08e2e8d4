"""Decides what becomes of a step: once, and alike on every device."""

from __future__ import annotations

from dataclasses import dataclass

from onefold.core.head import Said
from onefold.core.weights_of_step import StepWeight

__all__ = ["Verdict", "verdict_of"]


@dataclass(frozen=True, slots=True)
class Verdict:
    """What becomes of a step."""

    skipped: str
    """Why the parameters are left alone; empty where they are updated."""
    stops: bool
    """Whether a device was asked to stop: the run then ends after this step, once it is saved."""

    @property
    def updates(self) -> bool:
        """Whether the parameters are updated."""
        return not self.skipped


def verdict_of(weight: StepWeight, said: Said, failure: str = "") -> Verdict:
    """Reach the verdict on a step.

    Args:
        weight: the whole batch's, the same on all devices.
        said: what all devices reported when the step began.
        failure: what is not finite in it, if the step is to be skipped for it.
    """
    # From what all devices have in common, and so without another exchange.
    nothing = "" if weight.value > 0 or failure else "the batch's weights add up to 0"
    return Verdict(skipped=failure or nothing, stops=said.stop)
