"""What the kernel tells of processes (Linux)."""

from __future__ import annotations

import ctypes
import os
import signal

__all__ = ["LOOK_S", "Stillness", "die_with_parent"]

LOOK_S = 0.5
"""How often who waits for processes looks at them."""
_STILL_LOOKS = 8
_PR_SET_PDEATHSIG = 1


def _is_stopped(pid: int) -> bool:
    """Whether a process is stopped, by a signal or by a debugger."""
    try:
        with open(f"/proc/{pid}/stat", "rb") as file:
            return file.read().rpartition(b")")[2].split()[0] in (b"T", b"t")
    except OSError:
        return False


class Stillness:
    """Notices that a process stays stopped, and does not respond; looked at every `LOOK_S`.

    Args:
        pid: of the process.
    """

    def __init__(self, pid: int) -> None:
        self._pid = pid
        self._looks = 0

    @property
    def is_still(self) -> bool:
        """Whether it was found stopped by the last look."""
        return self._looks > 0

    def look(self) -> bool:
        """Whether it was found stopped so many times in a row that it will not go on by itself."""
        self._looks = self._looks + 1 if _is_stopped(self._pid) else 0
        return self._looks >= _STILL_LOOKS


def die_with_parent(parent: int) -> None:
    """Have the kernel kill this process when its parent ends, whatever ends it.

    Args:
        parent: process id of the parent; if that is gone already, this process ends here.
    """
    ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
    if os.getppid() != parent:
        os._exit(1)
