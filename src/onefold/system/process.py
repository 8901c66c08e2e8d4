"""Uses what the Linux kernel offers for processes: states, signals, cores and memory limits.

`ctrl_c_later` delays Ctrl-C where Python would lose it, or where it would interrupt a change.
`undone_by` ends a block although Ctrl-C may come at any moment. `Replaced` makes changes that can
be undone again after an interrupt.

Note: where Ctrl-C is lost
--------------------------
Python raises KeyboardInterrupt wherever the main thread happens to be. In a destructor, and in the
functions that run before and after a fork, Python prints and drops exceptions, and the program
continues as if nothing had happened. PyTorch ends the worker processes of a pass in a destructor,
and forks new ones for the next pass.
"""

from __future__ import annotations

# `signal` wraps these functions and looks up names in each call: 24 us per block instead of 3.
import _signal  # type: ignore[import-not-found]
import ctypes
import os
import signal
import threading
import weakref
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, suppress
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
    "Replaced",
    "StoppedProcess",
    "cores",
    "ctrl_c_as_before",
    "ctrl_c_later",
    "die_with_parent",
    "host_bytes",
    "undone_by",
]


LOOK_S = 0.5
"""Interval, in seconds, at which a waiting process samples the state of others."""
# Four seconds: a debugger that attaches or a batch system may suspend a process briefly.
_STILL_LOOKS = 8
_PR_SET_PDEATHSIG = 1


def _is_stopped(pid: int) -> bool:
    """Whether a process is suspended, by a signal or by a debugger."""
    try:
        # Search from the right: the name before the state may contain parentheses and spaces. T
        # means suspended by a signal, t by a debugger.
        with open(f"/proc/{pid}/stat", "rb") as file:
            return file.read().rpartition(b")")[2].split()[0] in (b"T", b"t")
    except OSError:
        return False


class StoppedProcess:
    """Detects that a process stays suspended; call `sample_state` every `LOOK_S` seconds.

    A suspended process is alive but never responds. Without this check, a process that waits for it
    would wait until the timeout without knowing why.

    Args:
        pid: id of the process.
    """

    def __init__(self, pid: int) -> None:
        self._pid = pid
        self._looks = 0

    @property
    def is_still(self) -> bool:
        """Whether the last sample found the process suspended."""
        return self._looks > 0

    def sample_state(self) -> bool:
        """Sample the state; return whether it was suspended too often in a row to continue."""
        self._looks = self._looks + 1 if _is_stopped(self._pid) else 0
        return self._looks >= _STILL_LOOKS


def die_with_parent(parent: int) -> None:
    """Make the kernel kill this process when its parent ends for any reason.

    Args:
        parent: process id of the parent; if it has already ended, this process exits here.
    """
    ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
    # The race: a parent that ended before the call above will not end again. Check after the call,
    # because the kernel handles a parent that ends from now on. Exit without cleanup, as after a
    # SIGKILL.
    if os.getppid() != parent:
        os._exit(1)


STOP_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
"""Signals that ask a program to stop: Ctrl-C, a scheduler or user, a closing terminal."""

NOTICES = (signal.SIGUSR1, signal.SIGUSR2)
"""Signals with which schedulers announce an end, such as Slurm's ``--signal=USR1@60``. They ask a
run that saves itself to stop, however often they arrive. They have no effect on other programs,
and do not replace a handler that the program has set."""

TOOLS_VARIABLE = "ONEFOLD_TOOLS"
"""Environment variable with the options of a run's tools, as JSON; see `RunOptions.tools`."""

STOPPED_CODE = 75
"""Exit code of a run that saved itself after a stop request, and can be resumed (EX_TEMPFAIL)."""

_Handler = Callable[[int, FrameType | None], Any]


@dataclass(slots=True)
class _Later:
    """A handler that notes that its signal arrived."""

    before: _Handler
    block: weakref.ref[ctrl_c_later]
    came: bool = False

    @property
    def is_left(self) -> bool:
        """Whether an interrupt prevented the end of the block from restoring the handler."""
        return self.block() is None

    def __call__(self, number: int, frame: FrameType | None) -> None:
        if not (self.came or self.is_left):
            self.came = True
            return
        # A second Ctrl-C: the user does not want to wait.
        times, self.came = 1 + self.came, False
        for _ in range(times):
            self.before(number, frame)


class ctrl_c_later:  # noqa: N801 (used like a function)
    """Delay Ctrl-C until the block ends, or until `deliver` is called.

    A second Ctrl-C is delivered at once.

    Args:
        others: other signals to delay.
    """

    __slots__ = ("__weakref__", "_later", "_numbers")

    def __init__(self, *others: signal.Signals) -> None:
        self._numbers: Sequence[int] = (signal.SIGINT, *others)
        self._later: list[tuple[int, _Later]] = []

    def __enter__(self) -> Self:
        # Python runs and sets signal handlers in the main thread only.
        if threading.current_thread() is not threading.main_thread():
            return self
        for number in self._numbers:
            handler = _signal.getsignal(number)
            while isinstance(handler, _Later) and handler.is_left:
                handler = handler.before
            # Without a Python handler nothing is raised, so nothing can be lost.
            if callable(handler):
                later = _Later(handler, weakref.ref(self))
                self._later.append((number, later))
                _signal.signal(number, later)
        return self

    def deliver(self) -> None:
        """Call the original handlers of the signals that arrived."""
        for number, later in self._later:
            if later.came:
                later.came = False
                later.before(number, None)

    def __exit__(self, *_: object) -> None:
        # Restore first: a handler may raise, and a second Ctrl-C must find the original handler.
        for number, later in self._later:
            _signal.signal(number, later.before)
        self.deliver()


@contextmanager
def undone_by(undo: Callable[[], None]) -> Iterator[None]:
    """Call a function at the end of this context, and delay Ctrl-C meanwhile.

    Ctrl-C may come just before the delay begins. The function is then called once more, so it must
    be safe to call twice.
    """
    try:
        try:
            yield
        finally:
            with ctrl_c_later():
                undo()
    except BaseException:
        with ctrl_c_later():
            undo()
        raise


def ctrl_c_as_before() -> None:
    """Undo `ctrl_c_later` in a process that was forked inside such a block."""
    handler = signal.getsignal(signal.SIGINT)
    # Blocks may be nested, and the child will not leave any of them.
    while isinstance(handler, _Later):
        handler = handler.before
    signal.signal(signal.SIGINT, handler)


def cores() -> int:
    """Return the number of CPU cores that this process may use."""
    return len(os.sched_getaffinity(0))


_GROUPS = Path("/sys/fs/cgroup")


def host_bytes() -> int:
    """Return the memory, in bytes, that this process may share with others on its host."""
    whole = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    return min([whole, *_limits()])


def _limits() -> Iterator[int]:
    """Yield the limits of this process's control groups, if any."""
    with suppress(OSError):
        for line in Path("/proc/self/cgroup").read_text().splitlines():
            # Group number, controllers, path; in version 2 the number is 0 and the second is empty.
            _, controlled, path = line.split(":", 2)
            if not controlled:
                yield from _read_limits(_GROUPS, path, "memory.max")
            elif "memory" in controlled.split(","):
                yield from _read_limits(_GROUPS / "memory", path, "memory.limit_in_bytes")


def _read_limits(root: Path, path: str, name: str) -> Iterator[int]:
    """Yield the limits of a group and of the groups around it."""
    own = root / path.lstrip("/")
    for folder in (own, *own.parents):
        with suppress(OSError, ValueError):  # "max" means no limit
            yield int((folder / name).read_text())


class Replaced(AbstractContextManager[None]):
    """Replaces attributes of an object inside a block.

    It is safe to exit twice: do so if an interrupt may have cut the first exit short.

    >>> from types import SimpleNamespace
    >>> layer = SimpleNamespace(size=2)
    >>> with Replaced(layer, size=3, name="a"):
    ...     layer
    namespace(size=3, name='a')
    >>> layer
    namespace(size=2)
    """

    def __init__(self, owner: object, **values: object) -> None:
        self._attributes, self._values = vars(owner), values
        self._before = {name: vars(owner)[name] for name in values if name in vars(owner)}

    def __enter__(self) -> None:
        self._attributes.update(self._values)

    def __exit__(self, *_: object) -> None:
        for name in self._values.keys() - self._before.keys():
            self._attributes.pop(name, None)
        self._attributes.update(self._before)
