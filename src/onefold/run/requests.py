"""Passes requests to stop a run on to workers that save themselves."""

from __future__ import annotations

import signal
import time

from onefold.core.options import RunOptions
from onefold.run.rundir import Board
from onefold.system.interrupt import StopSignals

__all__ = ["Requests", "StoppedAtOnce"]


class StoppedAtOnce(Exception):
    """The run is to end now: by its first signal, by a second one, or as its grace is over."""


class Requests:
    """Decides what a request to stop does.

    Workers that can save themselves are asked to at the first request, and ended at the second.
    Others are ended at the first.

    Args:
        signals: the signals that have come to the launcher.
        board: the memory shared with the workers.
        options: the options of the run.
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
        """The first signal that came to the launcher, if any did."""
        return self._signals.came[0] if self._signals.came else None

    @property
    def twice(self) -> bool:
        """Whether a second signal to stop came to the launcher."""
        return self._signals.look() > 1

    def check(self) -> None:
        """Act on the requests that have come since the last call.

        Raises:
            StoppedAtOnce: the run is to end now.
        """
        signals = self._signals.look()
        if signals > (1 if self._saves else 0):
            raise StoppedAtOnce
        # The grace runs from the first request, even if a worker got it: then the table says so.
        if self.came and not self._deadline_s:
            self._deadline_s = time.monotonic() + self._limit_s
            self._progress.request_stop()
        if self._deadline_s and time.monotonic() > self._deadline_s:
            raise StoppedAtOnce
