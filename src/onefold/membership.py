"""The runs that this process is part of, so that others hear of it when it fails.

A worker of ``onefold run`` reports through `onefold.worker`; under another launcher, the hooks set
here see to it.
"""

from __future__ import annotations

import atexit
import os
import sys
import tempfile
import weakref
from pathlib import Path
from types import TracebackType
from typing import Protocol

from onefold.errors import PeerError
from onefold.world import World

__all__ = ["abandon", "hush_and_report", "register"]


class _Closable(Protocol):
    def close(self, failure: BaseException | None = None) -> None: ...


_open: weakref.WeakSet[_Closable] = weakref.WeakSet()


def register(member: _Closable) -> None:
    """Close ``member`` when this process fails or ends."""
    if not _open:
        atexit.register(_leave)
    _open.add(member)


def abandon(failure: BaseException) -> None:
    """Tell the other devices of every run that this process fails."""
    for member in list(_open):
        member.close(failure)


def _leave() -> None:
    for member in list(_open):
        member.close()


def hush_and_report(world: World) -> None:
    """For a worker of a launcher that is not ours: one screen, and one traceback on it.

    Output of the devices other than the lead goes to a log file from here on, which the lead's
    output does not need. An exception that no other device caused is shown on the screen.
    """
    screen = os.fdopen(os.dup(2), "w")
    if world.rank != 0:
        folder = Path(tempfile.mkdtemp(prefix=f"onefold-device-{world.rank}-"))
        descriptor = os.open(folder / "output.log", os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
        sys.stdout.flush()
        sys.stderr.flush()
        os.dup2(descriptor, 1)
        os.dup2(descriptor, 2)
        os.close(descriptor)
    previous = sys.excepthook

    def report(
        kind: type[BaseException], error: BaseException, trace: TracebackType | None
    ) -> None:
        abandon(error)
        if isinstance(error, PeerError):
            print(f"onefold: {error}", file=screen, flush=True)
            return
        sys.stderr.flush()
        os.dup2(screen.fileno(), 2)
        previous(kind, error, trace)

    sys.excepthook = report
