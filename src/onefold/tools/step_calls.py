"""Calls the functions that a script registers with `Trainer.on_step`."""

from __future__ import annotations

from collections.abc import Callable

from onefold.core.assignment import Devices
from onefold.core.randomness import forked_generators
from onefold.session.run import RunSetup, RunView
from onefold.step.hook import Hook, ScriptCall, Spans
from onefold.step.result import Step

__all__ = ["StepCalls", "prepare"]


def prepare(start: RunSetup) -> Callable[[RunView], StepCalls]:
    """Create the hook of a run."""
    return lambda run: StepCalls(run.devices)


class StepCalls(Hook):
    """Calls the script's functions with every step, including replayed ones.

    Args:
        devices: devices of the run. Only the lead calls the functions.
    """

    def __init__(self, devices: Devices) -> None:
        self._devices = devices
        self._functions: list[Callable[[Step], object]] = []

    def add(self, observe: Callable[[Step], object]) -> None:
        """Add a function to call with every step; see `Trainer.on_step`.

        Raises:
            TypeError: it is not a function.
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
