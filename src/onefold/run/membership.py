"""The runs that this process is part of, so that others hear of it when it fails.

A worker of ``onefold run`` reports through `onefold.run.worker`; under another launcher, the hooks
set here see to it. A forked child is part of no run: it forgets all of it, and reports nothing.
"""

from __future__ import annotations

import atexit
import functools
import os
import sys
import weakref
from collections.abc import Callable
from types import TracebackType
from typing import Protocol

from onefold.core.world import World
from onefold.errors import PeerError
from onefold.system.ownfiles import PrivateFolder, create_file

__all__ = ["abandon", "at_good_end", "end_well", "hush_and_report", "register"]


class _Closable(Protocol):
    def close(self, failure: BaseException | None = None) -> None: ...


_endings: list[Callable[[], None]] = []
_open: weakref.WeakSet[_Closable] = weakref.WeakSet()


def register(member: _Closable) -> None:
    """Close ``member`` when this process fails or ends."""
    _forget_in_children()
    if not _open:
        atexit.register(_leave)
    _open.add(member)


def abandon(failure: BaseException) -> None:
    """Tell the other devices of every run that this process fails."""
    for member in list(_open):
        member.close(failure)


def at_good_end(call: Callable[[], None]) -> None:
    """Have something called when the script of a worker has come to its end without an error."""
    _forget_in_children()
    _endings.append(call)


def end_well() -> None:
    """Call what was to be called at a good end; what that raises makes it a bad one."""
    while _endings:
        _endings.pop(0)()


def _leave() -> None:
    for member in list(_open):
        member.close()


@functools.cache
def _forget_in_children() -> None:
    os.register_at_fork(after_in_child=_forget)


def _forget() -> None:
    """In a child that was just forked: its parent is the device, and will end the run."""
    _endings.clear()
    _open.clear()
    _log_folders.clear()
    for call in (_leave, _remove_logs):
        atexit.unregister(call)


def hush_and_report(world: World) -> None:
    """For a worker of a launcher that is not ours: one screen, and one traceback on it.

    Output of the devices other than the lead goes to a log file from here on, which the lead's
    output does not need. An exception that no other device caused is shown on the screen.
    """
    screen = os.fdopen(os.dup(2), "w")
    if world.rank != 0:
        _write_to_log(world.rank)
    previous = sys.excepthook

    def report(
        kind: type[BaseException], error: BaseException, trace: TracebackType | None
    ) -> None:
        _keep_logs()
        abandon(error)
        if not isinstance(error, PeerError):
            sys.stderr.flush()
            os.dup2(screen.fileno(), 2)
            previous(kind, error, trace)
        elif world.rank == (1 if error.device == 0 else 0):  # one of them is enough to say so
            print(f"onefold: {error}", file=screen, flush=True)

    sys.excepthook = report


_log_folders: list[PrivateFolder] = []


def _write_to_log(rank: int) -> None:
    folder = PrivateFolder(f"onefold-device-{rank}-")
    _log_folders.append(folder)
    descriptor = create_file(folder.path / "output.log", append=True)
    sys.stdout.flush()
    sys.stderr.flush()
    os.dup2(descriptor, 1)
    os.dup2(descriptor, 2)
    os.close(descriptor)
    _forget_in_children()
    atexit.register(_remove_logs)


def _keep_logs() -> None:
    atexit.unregister(_remove_logs)


def _remove_logs() -> None:
    while _log_folders:
        _log_folders.pop().remove()
