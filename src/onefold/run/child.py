"""One worker of a run, as its launcher sees it.

Note: whose number a process has
--------------------------------
The number of a process, and of its group, is given to another one as soon as its end was collected
(by wait, or by Popen.poll, which does so as well). So nobody collects before the end of the run:
that a worker has ended is learnt without collecting it (WNOWAIT, or its descriptor), its group is
killed while its number is still taken, and only then is it collected. No signal is sent afterwards.
"""

from __future__ import annotations

import contextlib
import os
import select
import signal
import subprocess
from collections.abc import Sequence

from onefold.system.process import Stillness

__all__ = ["Worker", "poll"]


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
        self.descriptor = os.pidfd_open(process.pid)
        """Can be read from when the process has ended."""

    def __str__(self) -> str:
        return f"device {self.rank} ({self.device}, process {self.pid})"

    @property
    def code(self) -> int | None:
        """Its exit code, or a signal's number below 0; None while it runs. Collects nothing."""
        if self._code is None:
            self._code = self._look()
        return self._code

    def _look(self) -> int | None:
        try:
            end = os.waitid(os.P_PID, self.pid, os.WEXITED | os.WNOHANG | os.WNOWAIT)
        except ChildProcessError:  # somebody else in this program has collected it, code and all
            self._collected = True
            return 0
        if end is None:
            return None
        return end.si_status if end.si_code == os.CLD_EXITED else -end.si_status

    def signal(self, number: signal.Signals) -> None:
        """Send a signal to the worker alone."""
        if self.code is None:
            signal.pidfd_send_signal(self.descriptor, number)

    def kill_all(self) -> None:
        """Kill the worker and all its children; not once its end was collected."""
        self.ended_by_us |= self.code is None
        self.signal(signal.SIGKILL)  # a script may have made another group its own
        if not self._collected:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(self.pid, signal.SIGKILL)

    def collect(self) -> None:
        """Have the system forget it; nothing is sent to its number from here on."""
        if self.code is not None:
            self._collected = True
            self._process.wait()
        os.close(self.descriptor)


def poll(descriptors: Sequence[int], limit_s: float) -> set[int]:
    """Which of them can be read from within the limit."""
    poller = select.poll()
    for descriptor in descriptors:
        poller.register(descriptor, select.POLLIN)
    return {descriptor for descriptor, _ in poller.poll(max(0.0, limit_s) * 1000)}
