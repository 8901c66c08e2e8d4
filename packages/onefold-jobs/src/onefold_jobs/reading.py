"""Chooses how many processes read a device's training samples ahead, from its first steps.

Note: how the number is found
-----------------------------
With ``--workers auto``, a device first reads in its own process, so that a step shows how long
reading and computing take. If data limit the steps, as many processes as can read a batch while
another one is computed continue with the next batch. If steps with them take as long as before, as
on a machine whose cores all compute, later passes read without them. Each device decides alone:
bits do not depend on who reads, and a resumed run measures again, perhaps on another machine.
"""

from __future__ import annotations

import math
import os

import onefold
from onefold.cli import counted

__all__ = ["LEAST_S", "Workers"]

_BY_DATA = "limited by data"
"""Beginning of ``step.seconds.limit`` if steps wait for their batches."""
_FIRST_STEPS = 2
"""Steps that are not measured: they compile and check, or wait for new processes."""
_MEASURED_STEPS = 10
LEAST_S = 1.0
"""Seconds per epoch that waiting must take, or starting processes would not pay off."""
_MOST = 8


class Workers:
    """The processes that read the training samples of this device.

    Args:
        given: value of ``--workers``: a number or ``auto``.
        loader: loader of the training samples.
        steps: number of steps per epoch.
        devices: number of devices that share the cores of this machine.
    """

    def __init__(self, given: str, loader: onefold.Loader, *, steps: int, devices: int) -> None:
        self._loader = loader
        self._steps_of_epoch = steps
        self._measured = max(1, min(_MEASURED_STEPS, steps - _FIRST_STEPS))
        cores = len(os.sched_getaffinity(0))
        self._most = max(1, min(_MOST, cores // devices))
        self._is_auto = given == "auto"
        self._is_settled = not self._is_auto
        self._steps: list[onefold.Step] = []
        self._before_s = 0.0

    @property
    def number(self) -> int:
        """Number of processes."""
        return self._loader.workers

    @property
    def was_chosen(self) -> bool:
        """Whether several processes have been tried because of the measured times."""
        return bool(self._before_s)

    def advised(self, limit: str) -> str:
        """Correct ``step.seconds.limit``: with ``auto``, another number is not the remedy."""
        if not self._is_auto or not limit.startswith(_BY_DATA):
            return limit
        # More processes have been tried.
        if self.was_chosen:
            return ""
        fact, _, _ = limit.partition(". Use ")
        return f"{fact}. --workers auto reads ahead if waiting takes {LEAST_S:g} s of an epoch"

    def note(self, step: onefold.Step) -> str:
        """Count a step; return a remark if the number changes, otherwise nothing."""
        if self._is_settled:
            return ""
        self._steps.append(step)
        if len(self._steps) < _FIRST_STEPS + self._measured:
            return ""
        # Reading times makes Python wait for a GPU, so all are read at once.
        first, *others = (each.seconds for each in self._steps[_FIRST_STEPS:])
        seconds = sum(others, first)
        self._steps.clear()
        steps = seconds.steps
        rest_s = seconds.forward + seconds.backward + seconds.exchange + seconds.update
        step_s, data_s = (rest_s + seconds.data) / steps, seconds.data / steps
        if self._before_s:
            self._is_settled = True
            if step_s < self._before_s:
                return ""
            self._loader.workers = 0
            return (
                f"--workers auto: later epochs read without extra processes, because a step takes "
                f"{_ms(step_s)} with them and {_ms(self._before_s)} without"
            )
        limited = seconds.limit.startswith(_BY_DATA)
        if not limited or data_s * self._steps_of_epoch < LEAST_S:
            self._is_settled = True
            return ""
        self._before_s = step_s
        needed = math.ceil(step_s / max(step_s - data_s, step_s / _MOST))
        self._loader.workers = number = min(needed, self._most)
        return (
            f"--workers auto: {counted(number, 'process')} per device read ahead from step "
            f"{step.number + 1} on, because a step waited for its batch for {_ms(data_s)} of "
            f"{_ms(step_s)}"
        )


def _ms(time_s: float) -> str:
    return f"{1e3 * time_s:.0f} ms"
