"""What the kernel tells of processes (Linux)."""

from __future__ import annotations

import ctypes
import os
import signal

__all__ = ["die_with_parent", "stopped_process"]

_PR_SET_PDEATHSIG = 1


def stopped_process(pid: int) -> bool:
    """Whether a process is stopped, by a signal or by a debugger."""
    try:
        with open(f"/proc/{pid}/stat", "rb") as file:
            return file.read().rpartition(b")")[2].split()[0] in (b"T", b"t")
    except OSError:
        return False


def die_with_parent(parent: int) -> None:
    """Have the kernel kill this process when its parent ends, whatever ends it.

    Args:
        parent: process id of the parent; if that is gone already, this process ends here.
    """
    ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
    if os.getppid() != parent:
        os._exit(1)
