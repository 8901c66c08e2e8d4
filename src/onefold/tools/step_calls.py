"""The functions of a script that are called with every step: `Trainer.on_step`."""

from __future__ import annotations

from collections.abc import Callable

from onefold.core.assignment import Devices
from onefold.core.randomness import forked_generators
from onefold.session.run import RunSetup, RunView
from onefold.step.hook import Hook, ScriptCall, Spans
from onefold.step.result import Step

__all__ = ["StepCalls", "prepare"]


def prepare(start: RunSetup) -> Callable[[RunView], StepCalls]:
    """Make the hook of a run."""
    return lambda run: StepCalls(run.devices)


class StepCalls(Hook):
    """Calls the functions of the script with every step, answered ones included.

    Args:
        devices: who takes part; the lead alone calls them.
    """

    def __init__(self, devices: Devices) -> None:
        self._devices = devices
        self._functions: list[Callable[[Step], object]] = []

    def add(self, observe: Callable[[Step], object]) -> None:
        """Call a function with every step as well; see `Trainer.on_step`.

        Raises:
            TypeError: it is no function.
        """
        if not callable(observe):
            raise TypeError(
                f"on_step expects a function that takes a step, got {type(observe).__name__}"
            )
        self._functions.append(observe)

    def after_step(self, asked: ScriptCall, step: Step, spans: Spans) -> None:
        """Call the functions with a step."""
        if self._functions and self._devices.has_lead:
            with forked_generators(*self._devices.own_devices.values()):
                for tell in self._functions:
                    tell(step)
