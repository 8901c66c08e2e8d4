"""Ctrl-C and other requests to stop: put off while they would be lost, noted, or raised.

Note: where Ctrl-C is lost
--------------------------
Python raises KeyboardInterrupt wherever the main thread is. In a destructor, and in what runs
before and after a fork, an exception is printed and dropped: the program goes on. PyTorch ends the
worker processes of a pass in a destructor and forks them for the next one.

Note: signals of the launcher
-----------------------------
A signal that raises may do so anywhere: after a worker was started and before it was noted, or
while a folder is being removed. So while a launcher watches over workers nothing is raised. Signals
are written down, and the launcher, which waits for a descriptor that wakes it, looks at them when
its own things are in order.
"""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from types import FrameType
from typing import Any, Self

__all__ = [
    "STOPPED_CODE",
    "STOP_SIGNALS",
    "StopSignals",
    "Stopped",
    "ctrl_c_as_before",
    "ctrl_c_later",
    "stopped_by_signals",
]

STOP_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
"""What asks a program to stop: Ctrl-C, a scheduler or a user, and a terminal that is closed."""

STOPPED_CODE = 75
"""Exit code of a run that was asked to stop, has saved itself, and can go on (EX_TEMPFAIL)."""

_Handler = Callable[[int, FrameType | None], Any]


class _Later:
    """Notes that Ctrl-C was pressed."""

    def __init__(self, before: _Handler) -> None:
        self.before = before
        self.came = False

    def __call__(self, number: int, frame: FrameType | None) -> None:
        self.came = True


@contextmanager
def ctrl_c_later() -> Iterator[None]:
    """Have Ctrl-C do what it does once the block is left."""
    before = signal.getsignal(signal.SIGINT)
    # Where nothing in Python handles it, and in other threads, nothing is raised either.
    if not callable(before) or threading.current_thread() is not threading.main_thread():
        yield
        return
    later = _Later(before)
    signal.signal(signal.SIGINT, later)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, before)
        if later.came:
            before(signal.SIGINT, None)


def ctrl_c_as_before() -> None:
    """Have Ctrl-C do at once what it does, in a process that was forked in such a block."""
    handler = signal.getsignal(signal.SIGINT)
    while isinstance(handler, _Later):
        handler = handler.before
    signal.signal(signal.SIGINT, handler)


class Stopped(KeyboardInterrupt):
    """SIGTERM or SIGHUP came; what handles Ctrl-C handles it."""

    def __init__(self, number: int) -> None:
        super().__init__(signal.Signals(number).name)
        self.number = signal.Signals(number)


class _Raise:
    """Raises what came."""

    def __init__(self, came: list[signal.Signals]) -> None:
        self._came = came

    def __call__(self, number: int, frame: FrameType | None) -> None:
        self._came.append(signal.Signals(number))
        raise Stopped(number)


@contextmanager
def stopped_by_signals() -> Iterator[list[signal.Signals]]:
    """A block that SIGTERM and SIGHUP end by `Stopped`, so that it puts its things in order.

    Signals that are ignored (SIGHUP below ``nohup``) or that the program handles are left alone.
    Gives the list of those that came, for who does not see the exception.
    """
    before: dict[int, Any] = {}
    came: list[signal.Signals] = []
    if threading.current_thread() is threading.main_thread():
        for number in (signal.SIGTERM, signal.SIGHUP):
            if signal.getsignal(number) == signal.SIG_DFL:
                before[number] = signal.signal(number, _Raise(came))
    try:
        yield came
    finally:
        for taken, handler in before.items():
            signal.signal(taken, handler)


class StopSignals:
    """A block in which signals to stop are noted, and raise nothing.

    Signals that somebody handles in a way of his own are left to him, unless the run saves itself;
    those that are ignored stay ignored, but for SIGINT and SIGTERM of such a run. In a thread other
    than the main one nothing is noted: Python handles signals in the main thread alone.

    Args:
        saves: the run saves itself when it is asked to stop.
    """

    def __init__(self, *, saves: bool) -> None:
        self._saves = saves
        self._before: dict[int, Any] = {}
        self.came: list[signal.Signals] = []
        """Those that came, in their order."""

    def __enter__(self) -> Self:
        self.descriptor = os.eventfd(0, os.EFD_CLOEXEC | os.EFD_NONBLOCK)
        """Can be read from when a signal has come that `look` has not seen."""
        if threading.current_thread() is not threading.main_thread():
            return self
        if signal.getsignal(signal.SIGCHLD) == signal.SIG_IGN:
            # Or the system would collect the workers' ends itself, and give their numbers away.
            self._before[signal.SIGCHLD] = signal.signal(signal.SIGCHLD, signal.SIG_DFL)
        for number in STOP_SIGNALS:
            if self._takes(number):
                self._before[number] = signal.signal(number, self._note)
        return self

    def __exit__(self, *_: object) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)
        os.close(self.descriptor)

    def look(self) -> int:
        """How many have come."""
        with suppress(BlockingIOError):
            os.eventfd_read(self.descriptor)
        return len(self.came)

    def _takes(self, number: signal.Signals) -> bool:
        before = signal.getsignal(number)
        if before is None or before == signal.SIG_IGN:
            return before is not None and self._saves and number != signal.SIGHUP
        ends_program = before in (signal.SIG_DFL, signal.default_int_handler)
        return self._saves or ends_program or isinstance(before, _Raise)

    def _note(self, number: int, frame: FrameType | None) -> None:
        self.came.append(signal.Signals(number))
        os.eventfd_write(self.descriptor, 1)
