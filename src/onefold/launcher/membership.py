"""Keeps the runs that this process is part of, and ends them: well, or so that all know why.

`leave` closes what `register` was given, and `end_well` calls what `at_good_end` was given.
`RunStopped` ends a script that was asked to stop. `advice_on_one_file` says what to do where two
processes of a run wrote one file.

A worker of ``onefold run`` reports through `onefold.worker`; under another launcher,
the hooks set here report. A forked child is part of no run: it forgets everything here, and
reports nothing.

Note: what runs at the end, and in which order
----------------------------------------------
An uncaught exception passes `sys.excepthook` first and the functions of `atexit` afterwards, in
reverse order of registration. So the hook tells the others why before `leave` closes anything, and
takes back the removal of the logs before that would run.
"""

from __future__ import annotations

import atexit
import errno
import functools
import logging
import os
import sys
import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import TracebackType
from typing import Protocol

from onefold.core.options import LaunchContext
from onefold.errors import PeerError
from onefold.exchange.progress import WAITING
from onefold.system.safe_files import PrivateFolder, create_file
from onefold.system.words import message_of, tell

__all__ = [
    "Members",
    "RunStopped",
    "advice_on_one_file",
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
    """The run was asked to stop, and has been saved; raised in a block of the script's."""


class _Closable(Protocol):
    def close(self, failure: BaseException | None = None) -> None: ...


class Members:
    """What is open in this process, and what is to be done in the end."""

    def __init__(self) -> None:
        self.endings: list[Callable[[], None]] = []
        # Weak, so that a Trainer that the script has dropped is not kept until the end.
        self.open: weakref.WeakSet[_Closable] = weakref.WeakSet()


members = Members()
"""Of this process, or of the simulated device that goes on."""


def register(member: _Closable) -> None:
    """Have ``member`` closed when this process fails or ends."""
    _forget_in_children()
    if not members.open:
        atexit.register(leave)
    members.open.add(member)


def leave(failure: BaseException | None = None) -> None:
    """Close all that is open; tell the other devices of every run of a failure, if there is one."""
    for member in list(members.open):
        member.close(failure)


def at_good_end(call: Callable[[], None]) -> None:
    """Have a function called when the script of a worker has ended without an error."""
    _forget_in_children()
    members.endings.append(call)


def end_well() -> None:
    """Call what `at_good_end` was given; an exception from one of these makes the run fail."""
    # Taken out before the call, so that none is called twice if it fails.
    while members.endings:
        members.endings.pop(0)()


def is_failing() -> bool:
    """Whether an exception is being handled that ends the script in error."""
    error = sys.exc_info()[1]
    ends_well = isinstance(error, SystemExit) and error.code in (None, 0)
    return error is not None and not ends_well


@contextmanager
def only_noting() -> Iterator[None]:
    """If the script is failing already, only log what is raised: the user must see the first."""
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
    """In a child that was just forked: the parent is the device, and will end the run."""
    # Emptied, not closed: what the members hold is the parent's, and so are the folders. Nor are
    # they let go, as memory of a GPU cannot be freed here.
    _of_the_parent.extend([*members.endings, *members.open])
    for held in (members.endings, members.open, _folders):
        held.clear()
    folder_until_the_end.cache_clear()
    for call in (leave, _remove_folders):
        atexit.unregister(call)


_of_the_parent: list[object] = []
"""What a forked child has inherited and never uses."""
_folders: list[PrivateFolder] = []
"""Those that are removed when this process ends."""


@functools.cache
def folder_until_the_end(prefix: str = "onefold-") -> PrivateFolder:
    """Make a private folder, once, which is removed when this process ends."""
    _forget_in_children()
    if not _folders:
        atexit.register(_remove_folders)
    _folders.append(PrivateFolder(prefix))
    return _folders[-1]


def _remove_folders() -> None:
    while _folders:
        _folders.pop().remove()


def hush_and_report(context: LaunchContext) -> None:
    """Under another launcher: show the lead's output alone, and one traceback for all devices.

    From here on, the output of the other devices goes to log files. An exception that no other
    device caused is shown on the screen, whichever device raised it.
    """
    # Duplicated before descriptor 2 is pointed at the log: the only way back to the screen.
    screen = os.fdopen(os.dup(2), "w")
    log = _write_to_log(context.rank) if context.rank else None
    # Whoever waits for the lead says so on the screen.
    logging.getLogger(WAITING).addHandler(logging.StreamHandler(screen))
    previous = sys.excepthook

    def report(
        kind: type[BaseException], error: BaseException, trace: TracebackType | None
    ) -> None:
        # Tell the others before printing, which may block: they are waiting.
        leave(error)
        if not isinstance(error, PeerError):
            sys.stderr.flush()
            os.dup2(screen.fileno(), 2)
            previous(kind, error, trace)
            if advice := advice_on_one_file(error, context.size):
                tell(advice, screen)
        elif context.rank == (1 if error.device == 0 else 0):  # one of them is enough to say so
            tell(str(error), screen)
        if log is not None and _is_kept(log):
            where = f"output of device {context.rank}: {log.path / _LOG}"
            tell(where, screen)

    sys.excepthook = report


_LOG = "output.log"


def _write_to_log(rank: int) -> PrivateFolder:
    folder = folder_until_the_end(f"onefold-device-{rank}-")
    descriptor = create_file(folder.path / _LOG, append=True)
    # What is buffered belongs to the screen; and the descriptors themselves are replaced, as
    # libraries in C and children write to them, not to sys.stdout.
    for stream, number in ((sys.stdout, 1), (sys.stderr, 2)):
        stream.flush()
        os.dup2(descriptor, number)
    os.close(descriptor)
    return folder


def _is_kept(folder: PrivateFolder) -> bool:
    """Leave a log that says anything to the user; return whether it does."""
    sys.stdout.flush()
    sys.stderr.flush()
    kept = folder in _folders and folder.is_there() and (folder.path / _LOG).stat().st_size > 0
    if kept:
        _folders.remove(folder)
        folder.keep()
    return kept


_IN_THE_WAY = {errno.EEXIST, errno.ENOTEMPTY, errno.EAGAIN, errno.EBUSY, errno.ETXTBSY}
"""Somebody else has made it, put something into it, locked it or uses it."""


def advice_on_one_file(error: BaseException, processes: int) -> str:
    """Say what to do where another process may have come first; empty for all other errors.

    Args:
        error: what ended the script.
        processes: how many processes run it.
    """
    if processes < 2 or not isinstance(error, OSError) or error.filename is None:
        return ""
    # A name that was renamed away before, by whoever was faster.
    moved = error.errno == errno.ENOENT and error.filename2 is not None
    if error.errno not in _IN_THE_WAY and not moved:
        return ""
    return (
        f"all {processes} processes of this run execute the script. If each of them writes "
        f"{error.filename}, let the lead alone do it, under `if trainer.is_lead:`, and have the "
        f"others wait in trainer.barrier() where they read it afterwards"
    )
