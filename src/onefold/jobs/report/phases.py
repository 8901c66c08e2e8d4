"""Adds up where the time of a run went, by device."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Mapping
from typing import NamedTuple

from onefold.jobs.progress import PHASES
from onefold.jobs.report.folder import EpochLine, Run, finite_or_zero

__all__ = ["ALL_PHASES", "DeviceTime", "device_times"]

ALL_PHASES = (*PHASES, "evaluation", "other")
"""The phases of training, the evaluation, and what is in none of these."""

_NEGLIGIBLE = 0.005
"""Share of a device's time below which evaluation and the rest are not shown."""

Times = Mapping[str, float]


class DeviceTime(NamedTuple):
    """The time of one device over all epochs."""

    name: str
    """Number and name of the device."""
    times_s: Times
    """Seconds in each phase."""

    @property
    def together_s(self) -> float:
        """Seconds in all phases."""
        return sum(self.times_s.values())

    def share(self, phase: str) -> float:
        """Return the share of a phase in the device's time, 0 to 1."""
        return self.times_s[phase] / self.together_s


def device_times(run: Run) -> list[DeviceTime]:
    """List the devices whose time was measured, all with the phases that are worth showing."""
    names: dict[int, str] = {}
    times: dict[int, dict[str, float]] = defaultdict(lambda: dict.fromkeys(ALL_PHASES, 0.0))
    for epoch in run.epochs:
        for index, (name, training) in enumerate(epoch.devices):
            # A resumed run may have other devices: a number has the name that it had last.
            names[index] = f"{index}: {name}"
            for phase, time_s in _spent(epoch, training).items():
                times[index][phase] += time_s
    # A device without any time would have no shares: they are divided by its sum.
    measured = {index: spent for index, spent in times.items() if sum(spent.values()) > 0}
    shown = [phase for phase in ALL_PHASES if _is_shown(phase, measured.values())]
    return [
        DeviceTime(names[index], {phase: measured[index][phase] for phase in shown})
        for index in sorted(measured)
    ]


def _spent(epoch: EpochLine, training: Times) -> Times:
    spent = {phase: finite_or_zero(time_s) for phase, time_s in training.items()}
    # Clocks of phases and of the epoch are read apart, so the rest may come out below 0.
    other_s = max(0.0, finite_or_zero(epoch.train_s) - sum(spent.values()))
    return {**spent, "evaluation": finite_or_zero(epoch.evaluate_s), "other": other_s}


def _is_shown(phase: str, devices: Iterable[Times]) -> bool:
    return phase in PHASES or any(
        times[phase] > _NEGLIGIBLE * sum(times.values()) for times in devices
    )
