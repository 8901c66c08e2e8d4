"""What the Linux kernel knows about processes and does with them.

`ctrl_c_later` delays Ctrl-C where Python would lose it, or where a change would stay unfinished.

Note: where Ctrl-C is lost
--------------------------
Python raises KeyboardInterrupt wherever the main thread happens to be. In a destructor, and in the
functions that run before and after a fork, an exception is printed and dropped, and the program
continues as if nothing had happened. PyTorch ends the worker processes of a pass in a destructor,
and forks new ones for the next pass.
"""

from __future__ import annotations

# `signal` wraps these functions and looks up names for each call: 24 us a block instead of 3.
import _signal  # type: ignore[import-not-found]
import ctypes
import os
import signal
import threading
import weakref
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
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
    "StoppedProcess",
    "cores",
    "ctrl_c_as_before",
    "ctrl_c_later",
    "die_with_parent",
    "host_bytes",
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


@dataclass(slots=True)
class _Later:
    """A handler that notes that a signal came, such as that Ctrl-C was pressed."""

    before: _Handler
    block: weakref.ref[ctrl_c_later]
    came: bool = False

    @property
    def is_left(self) -> bool:
        """Whether an interrupt kept the end of the block from restoring the former handler."""
        return self.block() is None

    def __call__(self, number: int, frame: FrameType | None) -> None:
        if not (self.came or self.is_left):
            self.came = True
            return
        # The user pressed Ctrl-C twice and does not want to wait.
        times, self.came = 1 + self.came, False
        for _ in range(times):
            self.before(number, frame)


class ctrl_c_later:  # noqa: N801 (used as a function is)
    """Delay Ctrl-C until the block ends, or until `deliver` is called.

    A second Ctrl-C is delivered at once.

    Args:
        others: signals that are delayed as well.
    """

    __slots__ = ("__weakref__", "_later", "_numbers")

    def __init__(self, *others: signal.Signals) -> None:
        self._numbers: Sequence[int] = (signal.SIGINT, *others)
        self._later: list[tuple[int, _Later]] = []

    def __enter__(self) -> Self:
        # Handlers run, and may be set, in the main thread only.
        if threading.current_thread() is not threading.main_thread():
            return self
        for number in self._numbers:
            handler = _signal.getsignal(number)
            while isinstance(handler, _Later) and handler.is_left:
                handler = handler.before
            # Without a handler in Python nothing is raised, so nothing can be lost.
            if callable(handler):
                later = _Later(handler, weakref.ref(self))
                self._later.append((number, later))
                _signal.signal(number, later)
        return self

    def deliver(self) -> None:
        """Call the former handlers of the signals that arrived."""
        for number, later in self._later:
            if later.came:
                later.came = False
                later.before(number, None)

    def __exit__(self, *_: object) -> None:
        # The old handlers first: one will raise, and a second Ctrl-C must find it in place.
        for number, later in self._later:
            _signal.signal(number, later.before)
        self.deliver()


def ctrl_c_as_before() -> None:
    """Undo `ctrl_c_later` in a process that was forked inside of such a block."""
    handler = signal.getsignal(signal.SIGINT)
    # Blocks may be nested, and the child has left none of them.
    while isinstance(handler, _Later):
        handler = handler.before
    signal.signal(signal.SIGINT, handler)


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
