"""Requests to stop a run, passed on to workers that save themselves."""

from __future__ import annotations

import signal
import time

from onefold.core.options import RunOptions
from onefold.run.rundir import Board
from onefold.system.interrupt import StopSignals

__all__ = ["Requests", "StoppedAtOnce"]


class StoppedAtOnce(Exception):
    """A signal came that ends the run, a second one came, or the time for stopping is over."""


class Requests:
    """Passes the first request to stop on to workers that save themselves, and ends the run at the
    second; at the first where they do not.

    Args:
        signals: that have come to the launcher.
        board: of the run.
        options: of the run.
    """

    def __init__(self, signals: StopSignals, board: Board, options: RunOptions) -> None:
        self._signals = signals
        self._progress = board.progress
        self._saves = options.may_stop
        self._limit_s = options.grace_s
        self._deadline_s = 0.0

    @property
    def came(self) -> bool:
        """Whether the run was asked to stop, through the launcher or a worker."""
        return bool(self._signals.came) or self._progress.stop_requested()

    @property
    def signal(self) -> signal.Signals | None:
        """Which one came to the launcher first."""
        return self._signals.came[0] if self._signals.came else None

    @property
    def twice(self) -> bool:
        """Whether a second one came."""
        return len(self._signals.came) > 1

    def check(self) -> None:
        """See to a request that has come.

        Raises:
            StoppedAtOnce: the run is to end now.
        """
        signals = self._signals.look()
        if signals > (1 if self._saves else 0):
            raise StoppedAtOnce
        if self.came and not self._deadline_s:
            self._deadline_s = time.monotonic() + self._limit_s
            self._progress.request_stop()
        if self._deadline_s and time.monotonic() > self._deadline_s:
            raise StoppedAtOnce
