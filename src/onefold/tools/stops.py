"""Stops a run on request: by a signal, by the launcher, or after a given step."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from onefold.session.run import RunSetup, RunView
from onefold.step.hook import Hook, ScriptCall, Surrounds
from onefold.system.process import requests_by_signals

__all__ = ["StopRequests", "prepare"]


def prepare(start: RunSetup) -> Callable[[RunView], Hook]:
    """Take signals from now on: while others are waited for, a signal would end this process."""
    requests = requests_by_signals(start.context.options.stop_signals)
    return lambda run: StopRequests(run, requests)


class StopRequests(Hook):
    """Tells each step whether this process was asked to stop.

    Devices see a signal at different times; the step agrees on one answer.

    Args:
        run: the run.
        requests: requests that arrived as signals; each signal adds one.
    """

    def __init__(self, run: RunView, requests: Sequence[bool]) -> None:
        self._position, self._progress, self._requests = run.position, run.progress, requests
        self._stops_after = run.context.options.stops_after

    def around(self, asked: ScriptCall) -> Surrounds:
        """Note whether to stop, right before all devices agree on it."""
        asked.asked_to_stop |= (
            bool(self._requests)
            or self._stops_after == self._position.step + 1
            or (self._progress is not None and self._progress.stop_requested())
        )
        return None
