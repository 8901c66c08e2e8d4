"""What the Linux kernel knows about processes, and does with them."""

from __future__ import annotations

import ctypes
import os
import signal

__all__ = ["LOOK_S", "Stillness", "die_with_parent"]

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


class Stillness:
    """Notices that a process has been stopped and stays so; call `look` every `LOOK_S`.

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

    def look(self) -> bool:
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
