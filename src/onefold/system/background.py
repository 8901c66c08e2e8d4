"""Runs a job in parallel with training: in a thread (`Background`) or a forked process (`Child`).

Note: reporting a failure
-------------------------
A thread cannot raise to its caller. Its exception is stored, and raised once by the training
thread's next call of `wait`. Exceptions that are still stored when the program ends are logged.
Only the training thread calls the methods, so the one write that crosses threads, of the failure,
is always read after ``join`` and needs no lock.

Note: what a fork copies
------------------------
The child starts with a copy of this process's memory, in the thread that forked it. So nothing has
to be sent to it, and everything that a computation may depend on is the same, including the state
of the thread: autocast, modes, the state of the script's objects. The child's changes are lost when
it ends, except in shared memory.

Other threads are not copied. OpenMP's threads, among which PyTorch divides its kernels, are ended
first; the next kernel creates them again, here and in the child. If only the child created a new
pool, it would need a new thread as its owner, which would lack this thread's state. PyTorch's
backward pass has its own threads only for accelerators; if it has created some, it raises an error
in the child. A lock that another thread holds during the fork stays locked in the child, which then
hangs. So the caller passes a limit when it requests the result.
"""

from __future__ import annotations

import atexit
import ctypes
import gc
import logging
import os
import signal
import sys
import threading
import warnings
import weakref
from collections.abc import Callable, Iterator, Set
from contextlib import contextmanager, suppress
from multiprocessing.connection import Connection, Pipe
from pathlib import Path
from typing import NoReturn

import torch

from onefold.system.process import NOTICES, STOP_SIGNALS, ctrl_c_later, die_with_parent

__all__ = ["Background", "Child", "ChildError", "finish_all", "has_idle_cores", "on_other_cores"]

_log = logging.getLogger("onefold")

_NICENESS = 10
"""Nice value of the thread, so that it runs mostly while training waits."""
_all: weakref.WeakSet[Background] = weakref.WeakSet()


class Background:
    """Runs one job at a time in a thread.

    Args:
        what: description of the jobs, for messages.
        gives_way: whether training continues in the meantime, and takes precedence.
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
        """Start a job; call `wait` for an earlier one first."""
        # A daemon thread would let the end of the program cut off a checkpoint.
        self._thread = threading.Thread(target=self._run, args=(job,), name=self.what)
        self._thread.start()

    def wait(self, limit_s: float | None = None) -> bool:
        """Wait for the job; return whether it has ended, and raise its exception.

        Args:
            limit_s: maximum wait in seconds; unlimited if None.
        """
        if self._thread is not None:
            self._thread.join(limit_s)
            if self._thread.is_alive():
                return False
            self._thread = None
        # Clear before raising, because a script that handles the exception may save again.
        failure, self._failure = self._failure, None
        if failure is not None:
            raise failure
        return True

    def abandon(self) -> None:
        """Wait for the job and ignore its outcome, because another failure came first."""
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
    """Lower the priority of this thread if the system allows it."""
    # On Linux each thread has a priority, although the call is documented for processes.
    thread = threading.get_native_id()
    with suppress(OSError):
        lower = max(os.getpriority(os.PRIO_PROCESS, thread), _NICENESS)
        os.setpriority(os.PRIO_PROCESS, thread, lower)


def finish_all() -> None:
    """Wait for all jobs, and raise the exception of the first that failed."""
    for background in list(_all):
        background.wait()


def _tell_unraised() -> None:
    for background in list(_all):
        try:
            background.wait()
        # No caller is left to raise to.
        except BaseException as failure:
            _log.error("%s failed: %s: %s", background.what, type(failure).__name__, failure)


_PAUSE_SOFT = 1
"""OpenMP's ``omp_pause_soft``, which keeps the settings."""
_DIVIDED_NUMEL = 1 << 18
"""Size of a tensor that PyTorch divides among all threads."""


class ChildError(Exception):
    """The child raised an error, ended without a result, or did not answer in time."""


class Child:
    """A forked copy of this process that computes one value and ends.

    Args:
        function: returns bytes; runs in the child.

    Raises:
        ChildError: this process cannot be forked.

    >>> Child(lambda: b"a value").result(limit_s=60.0)
    b'a value'
    """

    def __init__(self, function: Callable[[], bytes]) -> None:
        _dissolve_pools()
        core, parent = ctypes.CDLL(None).sched_getcpu(), os.getpid()
        self._reader, writer = Pipe(duplex=False)
        # The child ignores stop signals: this process handles them, and the child ends with it.
        before = signal.pthread_sigmask(signal.SIG_BLOCK, (*STOP_SIGNALS, *NOTICES))
        try:
            with ctrl_c_later(), warnings.catch_warnings():
                # Python warns about locks that other threads may hold: see the note above.
                warnings.simplefilter("ignore", DeprecationWarning)
                self._pid = os.fork()
            if not self._pid:
                _become(function, writer, parent, core)
        except OSError as error:
            raise ChildError(f"this process cannot be forked: {error.strerror}") from error
        finally:
            writer.close()
            signal.pthread_sigmask(signal.SIG_SETMASK, before)

    def result(self, limit_s: float) -> bytes:
        """Wait for the function's result, once. The child has ended afterwards.

        Raises:
            ChildError: there is no result within the limit, in seconds.
        """
        try:
            if not self._reader.poll(limit_s):
                raise ChildError(f"it did not answer within {limit_s:.0f} s")
            kind, value = self._reader.recv_bytes().split(b":", 1)
        except (EOFError, OSError):
            raise ChildError("it ended without an answer") from None
        finally:
            self.end()
        if kind == b"error":
            raise ChildError(value.decode())
        return value

    def end(self) -> None:
        """Kill the child if it still runs."""
        if self._pid:
            # The script may reap all of its children itself, including this one.
            with suppress(ChildProcessError, ProcessLookupError):
                if os.waitpid(self._pid, os.WNOHANG) == (0, 0):
                    os.kill(self._pid, signal.SIGKILL)
                    os.waitpid(self._pid, 0)
            self._pid = 0
            self._reader.close()


def has_idle_cores() -> bool:
    """Whether this process leaves enough cores idle for a child.

    Otherwise the two would wait for each other at the end of every kernel.
    """
    return len(os.sched_getaffinity(0)) >= 2 * torch.get_num_threads()


@contextmanager
def on_other_cores() -> Iterator[None]:
    """Move this thread to other cores inside the block, if there are enough."""
    allowed = os.sched_getaffinity(0)
    with suppress(ChildError):
        _dissolve_pools()
        _leave(ctypes.CDLL(None).sched_getcpu())
    try:
        yield
    finally:
        _move_to(allowed)
        with suppress(ChildError):
            _dissolve_pools()  # threads created in the block may not use that core


def _dissolve_pools() -> None:
    """End this thread's OpenMP thread pools, in each OpenMP library that is loaded."""
    lines = Path("/proc/self/maps").read_text().splitlines()
    # PyTorch and other libraries may each have their own libgomp. LLVM's OpenMP handles forks.
    for library in {path for line in lines if "/libgomp" in (path := line.split(maxsplit=5)[-1])}:
        try:
            failed = ctypes.CDLL(library).omp_pause_resource_all(_PAUSE_SOFT)
        except (OSError, AttributeError):
            failed = True  # the file was replaced since it was loaded, or is older than OpenMP 5
        if failed:
            raise ChildError(f"the threads of {library} cannot be ended")


def _become(function: Callable[[], bytes], writer: Connection, parent: int, core: int) -> NoReturn:
    """Run the function as the child, and exit."""
    try:
        die_with_parent(parent)
        # Collected objects may belong to threads or devices that the child does not have.
        gc.disable()
        # The parent has printed and logged the function's output already.
        logging.disable()
        with open(os.devnull, "w") as null:
            sys.stdout = sys.stderr = null
            os.dup2(null.fileno(), 1)
            os.dup2(null.fileno(), 2)
            _leave(core)
            writer.send_bytes(b"value:" + function())
    except BaseException as error:
        writer.send_bytes(f"error:{type(error).__name__}: {error}".encode())
    finally:
        os._exit(0)


def _leave(core: int) -> None:
    """Move this thread, and the threads that it creates, to other cores than this one."""
    others = os.sched_getaffinity(0) - {core}
    if 0 < len(others) < torch.get_num_threads():
        # All cores are needed. Threads created before this one moves may use all of them; this
        # thread then runs its part of each kernel on a core that already ran another part.
        torch.ones(_DIVIDED_NUMEL).mul_(2.0)
    if others:
        _move_to(others)


def _move_to(cores: Set[int]) -> None:
    """Move this thread to these cores, unless a container forbids it."""
    with suppress(PermissionError):
        os.sched_setaffinity(0, cores)
