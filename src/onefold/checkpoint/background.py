"""One piece of work at a time beside training; what fails there is told here."""

from __future__ import annotations

import atexit
import contextlib
import logging
import os
import threading
import weakref
from collections.abc import Callable

__all__ = ["Background", "finish_all"]

_log = logging.getLogger("onefold")

_NICENESS = 10
"""Of the thread: it takes the moments in which training waits, and little else."""
_all: weakref.WeakSet[Background] = weakref.WeakSet()


class Background:
    """Runs one job at a time in a thread.

    Args:
        what: it does, for errors.
        gives_way: to training, which goes on beside it.
    """

    def __init__(self, what: str, *, gives_way: bool = True) -> None:
        self.what = what
        self._gives_way = gives_way
        self._thread: threading.Thread | None = None
        self._failure: BaseException | None = None
        if not _all:
            atexit.register(_tell_unraised)
        _all.add(self)

    def start(self, job: Callable[[], None]) -> None:
        """Begin a job; one before it must have been waited for."""
        self._thread = threading.Thread(target=self._run, args=(job,), name=self.what)
        self._thread.start()

    def check(self) -> None:
        """Raise what a job that has ended has raised; does not wait."""
        if self._thread is not None and not self._thread.is_alive():
            self.wait()

    def done_within(self, limit_s: float) -> bool:
        """Whether the job has ended; waits for it so long, and raises what it has raised."""
        if self._thread is not None:
            self._thread.join(limit_s)
            if self._thread.is_alive():
                return False
        self.wait()
        return True

    def wait(self) -> None:
        """Wait for the job, and raise what it has raised."""
        if self._thread is not None:
            self._thread.join()
            self._thread = None
        if self._failure is not None:
            failure, self._failure = self._failure, None
            raise failure

    def abandon(self) -> None:
        """Wait for the job, whose end is of no interest any more: another failure came before."""
        if self._thread is not None:
            self._thread.join()
        self._thread = self._failure = None

    def tell(self) -> None:
        """Wait for the job, and write down what it has raised: nobody is left to catch it."""
        try:
            self.wait()
        except BaseException as failure:
            _log.error("%s failed: %s: %s", self.what, type(failure).__name__, failure)

    def _run(self, job: Callable[[], None]) -> None:
        try:
            if self._gives_way:
                _give_way()
            job()
        except BaseException as failure:
            self._failure = failure


def _give_way() -> None:
    """Lower the priority of this thread, where the system lets it."""
    thread = threading.get_native_id()
    with contextlib.suppress(OSError):
        lower = max(os.getpriority(os.PRIO_PROCESS, thread), _NICENESS)
        os.setpriority(os.PRIO_PROCESS, thread, lower)


def finish_all() -> None:
    """Wait for everything that is under way, and raise what has failed."""
    for background in list(_all):
        background.wait()


def _tell_unraised() -> None:
    for background in list(_all):
        background.tell()
