"""Runs one job at a time beside training, and hands its failure to whoever asks next.

Note: who sees a failure
------------------------
A thread has nobody to raise to. Its exception is kept, and raised once, by the first call of the
training thread that looks (`wait`). What nobody has looked at when the
program ends is written to the log. Only the training thread calls the methods, so the one write
that crosses threads, of the failure, is always read after ``join``, and needs no lock.
"""

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
"""Of the thread, so that it runs mostly while training waits."""
_all: weakref.WeakSet[Background] = weakref.WeakSet()


class Background:
    """Runs one job at a time in a thread.

    Args:
        what: what the jobs do, for messages.
        gives_way: whether training goes on meanwhile, and takes precedence.
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
        """Begin a job; an earlier one must have been waited for."""
        # No daemon: a checkpoint must not be cut off half-written when the program ends.
        self._thread = threading.Thread(target=self._run, args=(job,), name=self.what)
        self._thread.start()

    def wait(self, limit_s: float | None = None) -> bool:
        """Wait for the job; return whether it has ended, and raise what it has raised.

        Args:
            limit_s: the longest wait; without limit if None.
        """
        if self._thread is not None:
            self._thread.join(limit_s)
            if self._thread.is_alive():
                return False
            self._thread = None
        # Forgotten before it is raised: a script that survives it may save once more.
        failure, self._failure = self._failure, None
        if failure is not None:
            raise failure
        return True

    def abandon(self) -> None:
        """Wait for the job and ignore its outcome, as another failure came first."""
        if self._thread is not None:
            self._thread.join()
        self._thread = self._failure = None

    def _run(self, job: Callable[[], None]) -> None:
        try:
            if self._gives_way:
                _give_way()
            job()
        except BaseException as failure:
            self._failure = failure


def _give_way() -> None:
    """Lower the priority of this thread, where the system allows it."""
    # On Linux a priority is a thread's own, though the call is made for "a process".
    thread = threading.get_native_id()
    with contextlib.suppress(OSError):
        lower = max(os.getpriority(os.PRIO_PROCESS, thread), _NICENESS)
        os.setpriority(os.PRIO_PROCESS, thread, lower)


def finish_all() -> None:
    """Wait for all jobs, and raise what one of them has raised."""
    for background in list(_all):
        background.wait()


def _tell_unraised() -> None:
    for background in list(_all):
        try:
            background.wait()
        # Nobody is left to catch it.
        except BaseException as failure:
            _log.error("%s failed: %s: %s", background.what, type(failure).__name__, failure)
