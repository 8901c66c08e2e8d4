"""What the Linux kernel knows about processes and does with them, and how requests to stop arrive.

`ctrl_c_later` delays Ctrl-C where it would be lost. `StopSignals` and `take_requests` note requests
to stop, and `stopped_by_signals` has them raise `Stopped`.

Note: where Ctrl-C is lost
--------------------------
Python raises KeyboardInterrupt wherever the main thread happens to be. In a destructor, and in the
functions that run before and after a fork, an exception is printed and dropped, and the program
continues as if nothing had happened. PyTorch ends the worker processes of a pass in a destructor,
and forks new ones for the next pass.

Note: signals of the launcher
-----------------------------
A signal handler that raises may do so anywhere: after a worker was started and before it was
recorded, or while a folder is being removed. So while a launcher watches over workers, nothing is
raised. Signals are noted, and the launcher, which waits for a descriptor that wakes it, looks at
them when its own affairs are in order.
"""

from __future__ import annotations

import ctypes
import functools
import logging
import os
import signal
import threading
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from types import FrameType
from typing import Any, Self

__all__ = [
    "LOOK_S",
    "NOTICES",
    "STOPPED_CODE",
    "STOP_SIGNALS",
    "TOOLS_VARIABLE",
    "StopSignals",
    "Stopped",
    "StoppedProcess",
    "cores",
    "ctrl_c_as_before",
    "ctrl_c_later",
    "die_with_parent",
    "host_bytes",
    "requests_by_signals",
    "stopped_by_signals",
    "take_requests",
]


LOOK_S = 0.5
"""The interval at which somebody who waits for processes looks at them."""
# Four seconds: a process may be stopped briefly, by a debugger that attaches or a batch system.
_STILL_LOOKS = 8
_PR_SET_PDEATHSIG = 1


def _is_stopped(pid: int) -> bool:
    """Whether a process is stopped, by a signal or by a debugger."""
    try:
        # The state follows the name in parentheses, which may itself hold parentheses and blanks:
        # so it is found from the right. T is stopped by a signal, t by a debugger.
        with open(f"/proc/{pid}/stat", "rb") as file:
            return file.read().rpartition(b")")[2].split()[0] in (b"T", b"t")
    except OSError:
        return False


class StoppedProcess:
    """Notices that a process has been stopped and stays so; call `sample_state` every `LOOK_S`.

    A stopped process is alive and never responds: without this, whoever waits for it would wait
    until the timeout and not know why.

    Args:
        pid: id of the process.
    """

    def __init__(self, pid: int) -> None:
        self._pid = pid
        self._looks = 0

    @property
    def is_still(self) -> bool:
        """Whether the last look found the process stopped."""
        return self._looks > 0

    def sample_state(self) -> bool:
        """Look once; return whether it was stopped for so many looks that it will not continue."""
        self._looks = self._looks + 1 if _is_stopped(self._pid) else 0
        return self._looks >= _STILL_LOOKS


def die_with_parent(parent: int) -> None:
    """Have the kernel kill this process when its parent ends, however it ends.

    Args:
        parent: process id of the parent; if it has already ended, this process ends here.
    """
    ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
    # The race: a parent that ended before the call above will never end again. Asked afterwards, as
    # one that ends from now on is the kernel's business. Without clean-up, which a SIGKILL would
    # not have allowed either.
    if os.getppid() != parent:
        os._exit(1)


STOP_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
"""The signals that ask a program to stop: Ctrl-C, a scheduler or user, a terminal that closes."""

NOTICES = (signal.SIGUSR1, signal.SIGUSR2)
"""The signals by which schedulers announce an end, such as Slurm's ``--signal=USR1@60``. They ask
a run that saves itself to stop, however often they come, and nobody else: a program that does not
save has no use for them, and one that has a handler of its own keeps it."""

TOOLS_VARIABLE = "ONEFOLD_TOOLS"
"""Environment variable with the options of tools of a run, as JSON; see `RunOptions.tools`."""

STOPPED_CODE = 75
"""Exit code of a run that was asked to stop, has saved itself, and can go on (EX_TEMPFAIL)."""

_Handler = Callable[[int, FrameType | None], Any]


@dataclass
class _Later:
    """A handler that notes that a signal came, such as that Ctrl-C was pressed."""

    before: _Handler
    came: bool = False

    def __call__(self, number: int, frame: FrameType | None) -> None:
        self.came = True


@contextmanager
def ctrl_c_later(*others: signal.Signals) -> Iterator[None]:
    """Delay Ctrl-C until the block is left; it then does what it would have done.

    Args:
        others: signals that are delayed as well.
    """
    handlers = {number: signal.getsignal(number) for number in (signal.SIGINT, *others)}
    # Without a handler in Python nothing is raised, so nothing can be lost; and handlers run, and
    # may be set, in the main thread only.
    in_main = threading.current_thread() is threading.main_thread()
    later = {n: _Later(handler) for n, handler in handlers.items() if in_main and callable(handler)}
    for number, handler in later.items():
        signal.signal(number, handler)
    try:
        yield
    finally:
        # The old handlers first: one will raise, and a second Ctrl-C must find it in place.
        for number, handler in later.items():
            signal.signal(number, handler.before)
        for number, handler in later.items():
            if handler.came:
                handler.before(number, None)


def ctrl_c_as_before() -> None:
    """Undo `ctrl_c_later` in a process that was forked inside of such a block."""
    handler = signal.getsignal(signal.SIGINT)
    # Blocks may be nested, and the child has left none of them.
    while isinstance(handler, _Later):
        handler = handler.before
    signal.signal(signal.SIGINT, handler)


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


@functools.cache
def requests_by_signals(names: tuple[str, ...]) -> list[bool]:
    """Take signals as requests to stop, once in a process: a list that they make longer."""
    came: list[bool] = []
    if threading.current_thread() is threading.main_thread():
        take_requests([signal.Signals[f"SIG{name}"] for name in names], lambda: came.append(True))
    elif names:
        logging.getLogger("onefold").warning(
            "Python takes signals in its main thread alone, and this Trainer is made in another: "
            "%s will not ask the run to stop. Make the Trainer in the main thread",
            ", ".join(names),
        )
    return came


def cores() -> int:
    """Number of processor cores that this process may use."""
    return len(os.sched_getaffinity(0))


_GROUPS = Path("/sys/fs/cgroup")


def host_bytes() -> int:
    """All memory of the host of which this process may take a part."""
    whole = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    return min([whole, *_limits()])


def _limits() -> Iterator[int]:
    """The limits of the control groups that this process is in; none where they are not used."""
    with suppress(OSError):
        for line in Path("/proc/self/cgroup").read_text().splitlines():
            # Number, what is controlled, path; of version 2 the number is 0, the second is empty.
            _, controlled, path = line.split(":", 2)
            if not controlled:
                yield from _read_limits(_GROUPS, path, "memory.max")
            elif "memory" in controlled.split(","):
                yield from _read_limits(_GROUPS / "memory", path, "memory.limit_in_bytes")


def _read_limits(root: Path, path: str, name: str) -> Iterator[int]:
    """The limits of a group and of all that it is in."""
    own = root / path.lstrip("/")
    for folder in (own, *own.parents):
        with suppress(OSError, ValueError):  # it is "max" where there is none
            yield int((folder / name).read_text())


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
