"""One worker of a run, as its launcher sees it.

Note: when a process id is safe to signal
-----------------------------------------
Once the end of a process is collected (by wait, or by Popen.poll, which collects too), the kernel
may give its id, and that of its group, to another process. So no worker is collected before the end
of the run. Its end is noticed without collecting it (WNOWAIT, or its pidfd), its group is killed
while the id is still its own, and only then is it collected. No signal is sent afterwards.

Note: without pidfds
--------------------
Some containers, by seccomp, and kernels before 5.3 refuse them. A worker is then signalled by its
id, which is its own until it is collected, and its end is looked for several times a second.
"""

from __future__ import annotations

import contextlib
import errno
import os
import select
import signal
import subprocess
import time
from collections.abc import Sequence

from onefold.system.process import Stillness

__all__ = ["Worker", "wait_for_end"]

_REFUSED = frozenset({errno.ENOSYS, errno.EPERM, errno.EACCES})
_LOOK_S = 0.05


class Worker:
    """One process of the crew."""

    def __init__(self, rank: int, device: str, process: subprocess.Popen[bytes]) -> None:
        self.rank = rank
        self.device = device
        self.ended_s: float | None = None
        self.stillness = Stillness(process.pid)
        self.unresponsive = False
        self.ended_by_us = False
        self._process = process
        self._code: int | None = None
        self._collected = False
        self.pid = process.pid
        # Safe to open by id: a child that nobody has collected keeps its id, dead or alive.
        self.descriptor = _pidfd_of(process.pid)
        """A pidfd: readable once the process has ended. None where there is no such thing."""

    def __str__(self) -> str:
        return f"device {self.rank} ({self.device}, process {self.pid})"

    @property
    def code(self) -> int | None:
        """Its exit code, or minus the signal's number; None while it runs. Collects nothing."""
        if self._code is None:
            self._code = self._look()
        return self._code

    def _look(self) -> int | None:
        try:
            end = os.waitid(os.P_PID, self.pid, os.WEXITED | os.WNOHANG | os.WNOWAIT)
        # Something else in this program (a SIGCHLD handler, a wait for any child) has collected it,
        # code and all. Its id may be another process's by now.
        except ChildProcessError:
            self._collected = True
            return 0
        if end is None:
            return None
        return end.si_status if end.si_code == os.CLD_EXITED else -end.si_status

    def signal(self, number: signal.Signals) -> None:
        """Send a signal to the worker alone."""
        if self.code is not None:
            return
        # By pidfd, which never means another process, even if the worker ends right here.
        if self.descriptor is not None:
            try:
                signal.pidfd_send_signal(self.descriptor, number)
                return
            except OSError as error:
                if error.errno not in _REFUSED:
                    raise
        with contextlib.suppress(ProcessLookupError):
            os.kill(self.pid, number)

    def kill_all(self) -> None:
        """Kill the worker and all its children, unless its end was collected already."""
        # Asked before the kill, or a death of ours could not be told from one of its own.
        self.ended_by_us |= self.code is None
        # The worker by itself, as its script may have moved it to another group; then the group,
        # whose id lasts as long as the worker is uncollected.
        self.signal(signal.SIGKILL)
        if not self._collected:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(self.pid, signal.SIGKILL)

    def collect(self) -> None:
        """Collect its end; no signal may be sent to its id from here on."""
        # One that outlived its kill is left to the kernel: waiting for it could take for ever.
        if self.code is not None:
            self._collected = True
            self._process.wait()
        if self.descriptor is not None:
            os.close(self.descriptor)


def _pidfd_of(pid: int) -> int | None:
    try:
        return os.pidfd_open(pid)
    except OSError as error:
        if error.errno not in _REFUSED:
            raise
        return None


def wait_for_end(workers: Sequence[Worker], limit_s: float, wake: int | None = None) -> bool:
    """Wait until one of the workers has ended; return whether one has.

    Args:
        workers: those that run.
        limit_s: the longest wait.
        wake: a descriptor that ends the wait once it is readable.
    """
    limit, poller = time.monotonic() + limit_s, select.poll()
    for descriptor in (wake, *(worker.descriptor for worker in workers)):
        if descriptor is not None:
            poller.register(descriptor, select.POLLIN)
    step_s = _LOOK_S if any(worker.descriptor is None for worker in workers) else limit_s
    while True:
        left_s = max(0.0, limit - time.monotonic())
        ready = poller.poll(min(left_s, step_s) * 1000)
        if any(worker.code is not None for worker in workers):
            return True
        if ready or left_s == 0:
            return False
