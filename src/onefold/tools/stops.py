"""Stops a run on request: by a signal, by the launcher, or after a given step."""

from __future__ import annotations

import functools
import logging
import signal
import threading
from collections.abc import Callable, Sequence

from onefold.core.call_digest import StepRequests
from onefold.core.options import LaunchContext
from onefold.session.run import RunSetup, RunView
from onefold.step.hook import Hook, ScriptCall, Surrounds
from onefold.system.stop_signals import take_requests

__all__ = ["StopRequests", "prepare", "prepare_process", "requests_by_signals"]


@functools.cache
def requests_by_signals(names: tuple[str, ...]) -> list[bool]:
    """Register signals as stop requests, once per process; return a list that grows by requests."""
    came: list[bool] = []
    if threading.current_thread() is threading.main_thread():
        take_requests([signal.Signals[f"SIG{name}"] for name in names], lambda: came.append(True))
    elif names:
        logging.getLogger("onefold").warning(
            "Python handles signals only in the main thread, but this Trainer is created in "
            "another thread, so %s will not stop the run. Create the Trainer in the main thread",
            ", ".join(names),
        )
    return came


def prepare_process(context: LaunchContext) -> None:
    """Take signals before the script begins, which may take long to make its Trainer."""
    requests_by_signals(context.options.stop_signals)


def prepare(start: RunSetup) -> Callable[[RunView], Hook]:
    """Handle signals from now on: while waiting for others, a signal would kill this process."""
    requests = requests_by_signals(start.context.options.stop_signals)
    return lambda run: StopRequests(run, requests)


class StopRequests(Hook):
    """Passes a stop request of this process to each step.

    Devices see a signal at different times; the step agrees on one answer.

    Args:
        run: the run.
        requests: list of stop requests; each signal appends one.
    """

    def __init__(self, run: RunView, requests: Sequence[bool]) -> None:
        self._position, self._progress, self._requests = run.position, run.progress, requests
        self._stops_after = run.context.options.stops_after

    def around(self, asked: ScriptCall) -> Surrounds:
        """Note a stop request right before all devices agree on it."""
        if (
            self._requests
            or self._stops_after == self._position.step + 1
            or (self._progress is not None and self._progress.stop_requested())
        ):
            asked.requests |= StepRequests.STOP
        return None
