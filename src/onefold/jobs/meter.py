"""What the steps of an epoch come to, added up without waiting for a GPU."""

from __future__ import annotations

import math
import time
from collections.abc import Mapping
from dataclasses import asdict

import onefold
from onefold.jobs.progress import PHASES

__all__ = ["KEPT", "Meter"]

KEPT = 2
"""Newest checkpoints that stay, beside the best: if one is damaged, the other is near."""
_LOOK_S = 0.5
"""So often losses and times are looked at, which on a GPU has to wait."""


class Meter:
    """Adds up what the steps of an epoch come to, and looks at them only now and then.

    Args:
        so_far: what `saved` gave, where the run goes on in the middle of an epoch.
    """

    def __init__(self, so_far: Mapping[str, float]) -> None:
        self.total = so_far.get("total", 0.0)
        self.samples = int(so_far.get("samples", 0))
        self._before_s = so_far.get("seconds", 0.0)
        self.phases = {phase: so_far.get(phase, 0.0) for phase in PHASES}
        self.rate = so_far.get("rate", 0.0)
        self._start_s = self._looked_s = time.perf_counter()
        self._pending: list[onefold.Step] = []
        self._line = (so_far.get("line_total", 0.0), int(so_far.get("line_samples", 0)))
        self._line_start_s = self._start_s - so_far.get("line_seconds", 0.0)

    def add(self, step: onefold.Step, rate: float) -> None:
        self.rate = rate
        self._pending.append(step)
        if time.perf_counter() - self._looked_s > _LOOK_S:
            self.look()

    def look(self) -> None:
        """Read what has not been read."""
        line_total, line_samples = self._line
        for step in self._pending:
            total = float(step.loss) * step.samples
            self.total, self.samples = self.total + total, self.samples + step.samples
            line_total, line_samples = line_total + total, line_samples + step.samples
            for phase, seconds in asdict(step.seconds).items():
                self.phases[phase] += seconds
        self._line = line_total, line_samples
        self._pending.clear()
        self._looked_s = time.perf_counter()

    @property
    def seconds(self) -> float:
        """Since the epoch began."""
        return self._before_s + time.perf_counter() - self._start_s

    @property
    def mean_loss(self) -> float:
        """Of the samples looked at."""
        return self.total / self.samples if self.samples else float("nan")

    def take_line(self) -> dict[str, float]:
        """Mean loss and speed since the last line."""
        self.look()
        total, samples = self._line
        now_s = time.perf_counter()
        speed = samples / max(now_s - self._line_start_s, 1e-9)
        self._line, self._line_start_s = (0.0, 0), now_s
        loss = total / samples if samples else math.nan
        return {"loss": loss, "samples_per_s": speed, "lr": self.rate}

    def saved(self) -> dict[str, float]:
        """What a checkpoint in the middle of the epoch keeps."""
        self.look()
        return {
            "total": self.total,
            "samples": float(self.samples),
            "seconds": self.seconds,
            "rate": self.rate,
            "line_total": self._line[0],
            "line_samples": float(self._line[1]),
            "line_seconds": time.perf_counter() - self._line_start_s,
            **self.phases,
        }
