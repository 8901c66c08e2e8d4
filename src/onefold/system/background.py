"""Runs a job beside training: in a thread (`Background`), or in a forked process (`Child`).

Note: who sees a failure
------------------------
A thread has nobody to raise to. Its exception is kept, and raised once, by the first call of the
training thread that looks (`wait`). What nobody has looked at when the program ends is written to
the log. Only the training thread calls the methods, so the one write that crosses threads, of the
failure, is always read after ``join``, and needs no lock.

Note: what a fork takes along
-----------------------------
The child begins with a copy of all memory of this process and goes on in the thread that forked it.
So it needs nothing sent to it, and all that a computation may depend on is as it is here, down to
what belongs to a thread: autocast, modes, the state of a script's own objects. Whatever it changes
is gone with it, except in memory that processes share.

Other threads do not come along. Those of OpenMP, among which PyTorch divides its kernels, are
dissolved first: the next kernel makes them anew, here and in the child. A new pool in the child
alone would take a new thread to own it, which would lack all that belongs to this one. PyTorch's
backward pass has threads of its own for accelerators alone; where it has made some, it refuses to
run in the child, and says so. A lock that another thread holds during the fork stays locked in the
child, which then waits in vain: so whoever asks for the result names a limit.
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
    with suppress(OSError):
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


_PAUSE_SOFT = 1
"""OpenMP's ``omp_pause_soft``: settings are kept."""
_DIVIDED_NUMEL = 1 << 18
"""Of a tensor that PyTorch divides among all threads."""


class ChildError(Exception):
    """The child has raised an error, has ended, or has not answered in time."""


class Child:
    """A forked copy of this process, which computes one value and ends.

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
        # The child leaves it to this process to stop for a signal, and ends with it.
        before = signal.pthread_sigmask(signal.SIG_BLOCK, (*STOP_SIGNALS, *NOTICES))
        try:
            with ctrl_c_later(), warnings.catch_warnings():
                # Python warns of the locks that other threads may hold: see the note above.
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
        """Wait for what the function returns, once; the child is gone afterwards.

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
        """End the child, whatever it does; without effect once it is gone."""
        if self._pid:
            # A script may collect all of its children itself: then this one is gone.
            with suppress(ChildProcessError, ProcessLookupError):
                if os.waitpid(self._pid, os.WNOHANG) == (0, 0):
                    os.kill(self._pid, signal.SIGKILL)
                    os.waitpid(self._pid, 0)
            self._pid = 0
            self._reader.close()


def has_idle_cores() -> bool:
    """Whether a child has cores to itself while this process computes.

    Where it has not, the two would wait for each other at the end of every kernel.
    """
    return len(os.sched_getaffinity(0)) >= 2 * torch.get_num_threads()


@contextmanager
def on_other_cores() -> Iterator[None]:
    """Have this thread compute on other cores than its present one, as far as there are enough."""
    allowed = os.sched_getaffinity(0)
    with suppress(ChildError):
        _dissolve_pools()
        _leave(ctypes.CDLL(None).sched_getcpu())
    try:
        yield
    finally:
        _move_to(allowed)
        with suppress(ChildError):
            _dissolve_pools()  # the threads that were made meanwhile lack that core


def _dissolve_pools() -> None:
    """End this thread's pools of threads for kernels, in each OpenMP library that is loaded."""
    lines = Path("/proc/self/maps").read_text().splitlines()
    # PyTorch brings one of its own, and other libraries theirs. LLVM's looks after forks itself.
    for library in {path for line in lines if "/libgomp" in (path := line.split(maxsplit=5)[-1])}:
        try:
            failed = ctypes.CDLL(library).omp_pause_resource_all(_PAUSE_SOFT)
        except (OSError, AttributeError):
            failed = True  # replaced since it was loaded, or older than OpenMP 5
        if failed:
            raise ChildError(f"the threads of {library} cannot be ended")


def _become(function: Callable[[], bytes], writer: Connection, parent: int, core: int) -> NoReturn:
    """Be the child, and end."""
    try:
        die_with_parent(parent)
        # What is collected may belong to threads or devices that are not here.
        gc.disable()
        # What a function prints and logs was printed and logged by this process's parent.
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
    """Have this thread, and those that it makes, compute on other cores than this one."""
    others = os.sched_getaffinity(0) - {core}
    if 0 < len(others) < torch.get_num_threads():
        # All cores are needed. Threads that are made before this one moves have all of them; it
        # does its part of each kernel on a core that did another part before.
        torch.ones(_DIVIDED_NUMEL).mul_(2.0)
    if others:
        _move_to(others)


def _move_to(cores: Set[int]) -> None:
    """Have this thread compute on these cores, unless a container does not let it choose."""
    with suppress(PermissionError):
        os.sched_setaffinity(0, cores)
