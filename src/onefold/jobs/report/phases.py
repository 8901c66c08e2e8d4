"""Where the time of a run went, by device."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Mapping
from typing import NamedTuple

from onefold.jobs.progress import PHASES
from onefold.jobs.report.folder import EpochLine, Run, finite_or_zero

__all__ = ["ALL_PHASES", "DeviceTime", "device_times"]

ALL_PHASES = (*PHASES, "evaluation", "other")
"""Those of training; the evaluation, where all devices take part; and what is in no phase."""

_NEGLIGIBLE = 0.005
"""Share of time under which evaluation and the rest are not shown."""

Times = Mapping[str, float]


class DeviceTime(NamedTuple):
    """What one device did in all epochs."""

    name: str
    """Its number and name."""
    times_s: Times
    """Seconds in each phase."""

    @property
    def together_s(self) -> float:
        """Seconds in all of them."""
        return sum(self.times_s.values())

    def share(self, phase: str) -> float:
        """Of its time, 0 to 1."""
        return self.times_s[phase] / self.together_s


def device_times(run: Run) -> list[DeviceTime]:
    """The devices whose time was measured, all with the phases that are worth showing."""
    names: dict[int, str] = {}
    times: dict[int, dict[str, float]] = defaultdict(lambda: dict.fromkeys(ALL_PHASES, 0.0))
    for epoch in run.epochs:
        for index, (name, training) in enumerate(epoch.devices):
            names[index] = f"{index}: {name}"
            for phase, time_s in _spent(epoch, training).items():
                times[index][phase] += time_s
    measured = {index: spent for index, spent in times.items() if sum(spent.values()) > 0}
    shown = [phase for phase in ALL_PHASES if _is_shown(phase, measured.values())]
    return [
        DeviceTime(names[index], {phase: measured[index][phase] for phase in shown})
        for index in sorted(measured)
    ]


def _spent(epoch: EpochLine, training: Times) -> Times:
    spent = {phase: finite_or_zero(time_s) for phase, time_s in training.items()}
    other_s = max(0.0, finite_or_zero(epoch.train_s) - sum(spent.values()))
    return {**spent, "evaluation": finite_or_zero(epoch.evaluate_s), "other": other_s}


def _is_shown(phase: str, devices: Iterable[Times]) -> bool:
    return phase in PHASES or any(
        times[phase] > _NEGLIGIBLE * sum(times.values()) for times in devices
    )
