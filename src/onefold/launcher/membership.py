"""Tracks the runs that this process takes part in, and ends them: successfully, or with a reason.

`leave` closes the members passed to `register`, and `end_well` calls the functions passed to
`at_good_end`. `RunStopped` ends a script that was asked to stop.

A worker of ``onefold run`` reports through `onefold.worker`; under another launcher, the hooks set
here report. A forked child takes part in no run: it clears this module's state and reports nothing.

Note: the order of calls at exit
--------------------------------
For an uncaught exception, Python calls `sys.excepthook` first, then the functions of `atexit` in
reverse order of registration. So the hook sends the reason to the other devices before `leave`
closes anything, and cancels the removal of the logs before it would run.
"""

from __future__ import annotations

import atexit
import functools
import logging
import os
import sys
import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import TracebackType
from typing import Protocol

from onefold.core.late import load
from onefold.core.options import LaunchContext
from onefold.errors import PeerError
from onefold.exchange.progress import WAITING
from onefold.system.safe_files import PrivateFolder, create_file
from onefold.system.words import message_of, tell

__all__ = [
    "Members",
    "RunStopped",
    "at_good_end",
    "end_well",
    "folder_until_the_end",
    "hush_and_report",
    "is_failing",
    "leave",
    "only_noting",
    "register",
]

_log = logging.getLogger("onefold")


class RunStopped(SystemExit):
    """The run was asked to stop and has been saved; raised inside a block of the script."""


class _Closable(Protocol):
    def close(self, failure: BaseException | None = None) -> None: ...


class Members:
    """The open members of this process, and the functions to call at the end."""

    def __init__(self) -> None:
        self.endings: list[Callable[[], None]] = []
        # Weak, so that a Trainer that the script dropped is not kept alive until the end.
        self.open: weakref.WeakSet[_Closable] = weakref.WeakSet()


members = Members()
"""Members of this process, or of the simulated device that is running."""


def register(member: _Closable) -> None:
    """Register ``member`` to be closed when this process fails or ends."""
    _forget_in_children()
    if not members.open:
        atexit.register(leave)
    members.open.add(member)


def leave(failure: BaseException | None = None) -> None:
    """Close all open members; send a failure, if any, to the other devices of each run.

    After a failure, the functions passed to `at_good_end` are not called any more.
    """
    if failure is not None:
        members.endings.clear()
    for member in list(members.open):
        member.close(failure)


def at_good_end(call: Callable[[], None]) -> None:
    """Register a function that a worker calls after its script ends without an error."""
    _forget_in_children()
    members.endings.append(call)


def end_well() -> None:
    """Call the functions passed to `at_good_end`; an exception from one of them fails the run."""
    # Pop before the call, so that a failure never leads to a second call.
    while members.endings:
        members.endings.pop(0)()


def is_failing() -> bool:
    """Whether an exception is being handled that ends the script with an error."""
    error = sys.exc_info()[1]
    ends_well = isinstance(error, SystemExit) and error.code in (None, 0)
    return error is not None and not ends_well


@contextmanager
def only_noting() -> Iterator[None]:
    """If the script is failing already, only log new errors: the user must see the first one."""
    failing = is_failing()
    try:
        yield
    except Exception as error:
        if not failing:
            raise
        _log.error(
            "the end of the run was not saved: %s: %s", type(error).__name__, message_of(error)
        )


@functools.cache
def _forget_in_children() -> None:
    os.register_at_fork(after_in_child=_forget)


def _forget() -> None:
    """Clear the state in a forked child: the parent is the device, and will end the run."""
    # Do not close the members, because the parent owns what they hold. Do not free them either,
    # because the child cannot free memory of a GPU.
    _of_the_parent.extend([*members.endings, *members.open])
    for held in (members.endings, members.open, _folders):
        held.clear()
    folder_until_the_end.cache_clear()
    for call in (leave, _remove_folders):
        atexit.unregister(call)


_of_the_parent: list[object] = []
"""Objects that a forked child inherited and never uses."""
_folders: list[PrivateFolder] = []
"""Folders to remove when this process ends."""


@functools.cache
def folder_until_the_end(prefix: str = "onefold-") -> PrivateFolder:
    """Create a private folder, once, that is removed when this process ends."""
    _forget_in_children()
    if not _folders:
        atexit.register(_remove_folders)
    _folders.append(PrivateFolder(prefix))
    return _folders[-1]


def _remove_folders() -> None:
    while _folders:
        _folders.pop().remove()


def hush_and_report(context: LaunchContext) -> None:
    """Show only the lead's output, and one traceback for all devices, under another launcher.

    From here on, the other devices write their output to log files. An exception that was not
    caused by another device is shown on the screen, whichever device raised it.
    """
    # Duplicate descriptor 2 before it points to the log: there is no other way back to the screen.
    screen = os.fdopen(os.dup(2), "w")
    log = _write_to_log(context.rank) if context.rank else None
    # Messages about a long wait for the lead go to the screen, too.
    logging.getLogger(WAITING).addHandler(logging.StreamHandler(screen))
    previous = sys.excepthook

    def report(
        kind: type[BaseException], error: BaseException, trace: TracebackType | None
    ) -> None:
        # Send the failure before printing, which may block: the other devices are waiting.
        leave(error)
        if not isinstance(error, PeerError):
            sys.stderr.flush()
            os.dup2(screen.fileno(), 2)
            previous(kind, error, trace)
            if advice := load("launcher.workers").advice_on_one_file(error, context.size):
                tell(advice, screen)
        elif context.rank == (1 if error.device == 0 else 0):  # one device reports for all
            tell(str(error), screen)
        if log is not None and _is_kept(log):
            where = f"output of device {context.rank}: {log.path / _LOG}"
            tell(where, screen)

    sys.excepthook = report


_LOG = "output.log"


def _write_to_log(rank: int) -> PrivateFolder:
    folder = folder_until_the_end(f"onefold-device-{rank}-")
    descriptor = create_file(folder.path / _LOG, append=True)
    # Flush, because buffered output belongs to the screen. Replace the descriptors themselves,
    # because C libraries and child processes do not write through sys.stdout.
    for stream, number in ((sys.stdout, 1), (sys.stderr, 2)):
        stream.flush()
        os.dup2(descriptor, number)
    os.close(descriptor)
    return folder


def _is_kept(folder: PrivateFolder) -> bool:
    """Keep a log that is not empty; return whether it was kept."""
    sys.stdout.flush()
    sys.stderr.flush()
    kept = folder in _folders and folder.is_there() and (folder.path / _LOG).stat().st_size > 0
    if kept:
        _folders.remove(folder)
        folder.keep()
    return kept
