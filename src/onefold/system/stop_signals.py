"""Receives requests to stop: signals of a user, a scheduler or a closing terminal.

`StopSignals` and `take_requests` note them; `stopped_by_signals` makes them raise `Stopped`.

Note: signals of the launcher
-----------------------------
A signal handler that raises may do so anywhere: after a worker was started but before it was
recorded, or while a folder is being removed. So a launcher's handlers raise nothing while it
watches workers. They note the signals and wake the launcher through a descriptor, and it acts on
the signals when its state is consistent.
"""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from types import FrameType
from typing import Any, Self

from onefold.system.process import NOTICES, STOP_SIGNALS

__all__ = ["StopSignals", "Stopped", "stopped_by_signals", "take_requests"]


class Stopped(KeyboardInterrupt):
    """Raised when SIGTERM or SIGHUP arrives. Code that handles Ctrl-C handles it, too."""

    def __init__(self, number: int) -> None:
        super().__init__(signal.Signals(number).name)
        self.number = signal.Signals(number)


@dataclass(frozen=True)
class _Raise:
    """A handler that raises `Stopped` for the signal that arrived."""

    came: list[signal.Signals]

    def __call__(self, number: int, frame: FrameType | None) -> None:
        # Note before raising: the exception may be caught or lost.
        self.came.append(signal.Signals(number))
        raise Stopped(number)


@contextmanager
def stopped_by_signals() -> Iterator[list[signal.Signals]]:
    """Make SIGTERM and SIGHUP raise `Stopped` in the block, so that it can clean up.

    Signals that are ignored (SIGHUP under ``nohup``) or that the program handles are unaffected.
    Yields the list of signals that arrived, for code that does not see the exception.
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


def take_requests(numbers: Iterable[signal.Signals], note: Callable[[], None]) -> None:
    """Make signals request a stop of this process instead of their usual effect.

    The second signal has its usual effect, except for `NOTICES`, which may arrive several times.

    Args:
        numbers: the signals. SIGHUP stays ignored under ``nohup``.
        note: called in a signal handler when this process receives a stop request.
    """
    before: dict[int, Any] = {}  # the original handler of each signal
    process, asked = os.getpid(), list[int]()

    def request(number: int, frame: object) -> None:
        notice = number in NOTICES
        if os.getpid() == process and (notice or not asked):
            asked.extend([] if notice else [number])
            note()
            return
        # Slurm sends notices to every process of a step, and loader workers must continue.
        if notice:
            return
        # The second signal, or a signal to a forked child: let it have its usual effect.
        signal.signal(number, before[number])
        os.kill(os.getpid(), number)

    for number in numbers:
        if number in (signal.SIGINT, signal.SIGTERM) or signal.getsignal(number) != signal.SIG_IGN:
            before[number] = signal.signal(number, request) or signal.SIG_DFL


class StopSignals:
    """A block in which stop signals are noted, and nothing is raised.

    Signals that the program handles keep their handlers, unless the run saves itself. Ignored
    signals stay ignored, except SIGINT and SIGTERM in such a run. Outside the main thread nothing
    is noted, because Python handles signals in the main thread only.

    Args:
        saves: whether the run saves itself on a stop request.
    """

    def __init__(self, *, saves: bool) -> None:
        self._saves = saves
        self._before: dict[int, Any] = {}
        self.came: list[signal.Signals] = []
        """Signals in their order of arrival."""

    def __enter__(self) -> Self:
        # An eventfd instead of a pipe: it is a counter, so a flood of signals cannot fill it and
        # block the handler. Workers must not inherit it.
        self.descriptor = os.eventfd(0, os.EFD_CLOEXEC | os.EFD_NONBLOCK)
        """Readable once a signal arrives that `drain` has not counted."""
        if threading.current_thread() is not threading.main_thread():
            return self
        if signal.getsignal(signal.SIGCHLD) == signal.SIG_IGN:
            # If SIGCHLD is ignored, the kernel reaps dead workers itself: their exit codes are
            # lost, and their process ids may belong to other processes when a signal is sent.
            self._before[signal.SIGCHLD] = signal.signal(signal.SIGCHLD, signal.SIG_DFL)
        for number in (*STOP_SIGNALS, *NOTICES):
            if self._takes(number):
                self._before[number] = signal.signal(number, self._note)
        return self

    def __exit__(self, *_: object) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)
        # Close last: until the handlers are restored, a signal still writes to the descriptor.
        os.close(self.descriptor)

    def drain(self) -> int:
        """Clear the descriptor; return the number of signals so far, without `NOTICES`."""
        # Clear before counting: a signal in between is counted, and causes one extra wake-up. In
        # the other order it would be missed.
        with suppress(BlockingIOError):
            os.eventfd_read(self.descriptor)
        return sum(number not in NOTICES for number in self.came)

    def _takes(self, number: signal.Signals) -> bool:
        before = signal.getsignal(number)
        if number in NOTICES:
            return self._saves and before == signal.SIG_DFL
        # None means a handler that was not set from Python, which could not be restored.
        if before is None or before == signal.SIG_IGN:
            return before is not None and self._saves and number != signal.SIGHUP
        ends_program = before in (signal.SIG_DFL, signal.default_int_handler)
        return self._saves or ends_program or isinstance(before, _Raise)

    def _note(self, number: int, frame: FrameType | None) -> None:
        # Note the signal before the wake-up, so that the woken launcher finds it.
        self.came.append(signal.Signals(number))
        os.eventfd_write(self.descriptor, 1)
