"""How requests to stop arrive: signals of a user, a scheduler or a terminal that closes.

`StopSignals` and `take_requests` note them, and `stopped_by_signals` has them raise `Stopped`.

Note: signals of the launcher
-----------------------------
A signal handler that raises may do so anywhere: after a worker was started and before it was
recorded, or while a folder is being removed. So while a launcher watches over workers, nothing is
raised. Signals are noted, and the launcher, which waits for a descriptor that wakes it, looks at
them when its own affairs are in order.
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
    """Raised when SIGTERM or SIGHUP arrives; whatever handles Ctrl-C handles it, too."""

    def __init__(self, number: int) -> None:
        super().__init__(signal.Signals(number).name)
        self.number = signal.Signals(number)


@dataclass(frozen=True)
class _Raise:
    """A handler that raises the signal that arrived as `Stopped`."""

    came: list[signal.Signals]

    def __call__(self, number: int, frame: FrameType | None) -> None:
        # Noted before it is raised: somebody may catch the exception, or it may be lost.
        self.came.append(signal.Signals(number))
        raise Stopped(number)


@contextmanager
def stopped_by_signals() -> Iterator[list[signal.Signals]]:
    """Have SIGTERM and SIGHUP raise `Stopped` in the block, so that it can clean up after itself.

    Signals that are ignored (SIGHUP under ``nohup``) or that the program handles are left alone.
    Yields the list of those that arrived, for code that does not see the exception.
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
    """Have signals ask this process to stop, in place of what they would do.

    The second one ends it as it would have, but for `NOTICES`, which may come several times.

    Args:
        numbers: the signals. A hang-up that nohup has had ignored stays ignored.
        note: called in a signal handler when this process is asked to stop.
    """
    before: dict[int, Any] = {}  # signal: the handler that it had
    process, asked = os.getpid(), list[int]()

    def request(number: int, frame: object) -> None:
        notice = number in NOTICES
        if os.getpid() == process and (notice or not asked):
            asked.extend([] if notice else [number])
            note()
            return
        # Slurm gives notice to every process of a step, and loader workers must go on.
        if notice:
            return
        # The second signal, or one to a child of the script: end as the signal would have.
        signal.signal(number, before[number])
        os.kill(os.getpid(), number)

    for number in numbers:
        if number in (signal.SIGINT, signal.SIGTERM) or signal.getsignal(number) != signal.SIG_IGN:
            before[number] = signal.signal(number, request) or signal.SIG_DFL


class StopSignals:
    """A block in which signals to stop are noted, and nothing is raised.

    Signals that the program handles itself are left to it, unless the run saves itself; those that
    are ignored stay ignored, except SIGINT and SIGTERM in such a run. In a thread other than the
    main one nothing is noted, because Python handles signals in the main thread only.

    Args:
        saves: whether the run saves itself when it is asked to stop.
    """

    def __init__(self, *, saves: bool) -> None:
        self._saves = saves
        self._before: dict[int, Any] = {}
        self.came: list[signal.Signals] = []
        """The signals that arrived, in that order."""

    def __enter__(self) -> Self:
        # An eventfd rather than a pipe: a counter, which a flood of signals cannot fill up so that
        # the handler would block. Workers must not inherit it.
        self.descriptor = os.eventfd(0, os.EFD_CLOEXEC | os.EFD_NONBLOCK)
        """Readable once a signal has arrived that `drain` has not counted."""
        if threading.current_thread() is not threading.main_thread():
            return self
        if signal.getsignal(signal.SIGCHLD) == signal.SIG_IGN:
            # If SIGCHLD is ignored, the kernel reaps dead workers itself: their exit codes are
            # lost, and their process ids may belong to strangers by the time we send a signal.
            self._before[signal.SIGCHLD] = signal.signal(signal.SIGCHLD, signal.SIG_DFL)
        for number in (*STOP_SIGNALS, *NOTICES):
            if self._takes(number):
                self._before[number] = signal.signal(number, self._note)
        return self

    def __exit__(self, *_: object) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)
        # Closed last: until the handlers are restored, a signal still writes to it.
        os.close(self.descriptor)

    def drain(self) -> int:
        """Clear the descriptor, and return how many signals but `NOTICES` have arrived so far."""
        # Cleared before counting: a signal in between is counted and wakes the launcher once too
        # often. The other way round it would be missed.
        with suppress(BlockingIOError):
            os.eventfd_read(self.descriptor)
        return sum(number not in NOTICES for number in self.came)

    def _takes(self, number: signal.Signals) -> bool:
        before = signal.getsignal(number)
        if number in NOTICES:
            return self._saves and before == signal.SIG_DFL
        # None stands for a handler that was not set from Python; it could not be restored.
        if before is None or before == signal.SIG_IGN:
            return before is not None and self._saves and number != signal.SIGHUP
        ends_program = before in (signal.SIG_DFL, signal.default_int_handler)
        return self._saves or ends_program or isinstance(before, _Raise)

    def _note(self, number: int, frame: FrameType | None) -> None:
        # First the note, then the wake-up: whoever is woken must find something.
        self.came.append(signal.Signals(number))
        os.eventfd_write(self.descriptor, 1)
