"""Adds up losses and times of an epoch's steps, without waiting for a GPU in each.

Note: when a loss is read
-------------------------
To read the loss of a step, Python must wait until the GPU has computed it, and meanwhile queues
no further work. So steps are only collected, and read together every half a second, for a line of
metrics, or for a checkpoint. The order in which they are added up stays that of the steps.
"""

from __future__ import annotations

import math
import time
from collections.abc import Mapping
from dataclasses import asdict

import onefold
from onefold.jobs.progress import PHASES

__all__ = ["KEPT", "Meter"]

KEPT = 2
"""How many of the newest checkpoints stay, besides the best: two, in case one is damaged."""
_LOOK_S = 0.5
"""How long losses and times go unread while steps are made."""


class Meter:
    """Sums of losses, samples and seconds over the steps of an epoch.

    Args:
        so_far: what `saved` returned, if the run resumes in the middle of an epoch; else empty.
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
        # As if the line had begun earlier by the time that it took before the run was stopped.
        self._line_start_s = self._start_s - so_far.get("line_seconds", 0.0)

    def add(self, step: onefold.Step, rate: float) -> None:
        """Count a step, which was made at this learning rate."""
        self.rate = rate
        # Unread, or Python would wait for the GPU here: see the note.
        self._pending.append(step)
        if time.perf_counter() - self._looked_s > _LOOK_S:
            self.look()

    def look(self) -> None:
        """Read the losses and times of the steps that were only collected so far."""
        line_total, line_samples = self._line
        for step in self._pending:
            total = float(step.loss) * step.samples
            self.total, self.samples = self.total + total, self.samples + step.samples
            line_total, line_samples = line_total + total, line_samples + step.samples
            for phase, seconds in asdict(step.seconds).items():
                self.phases[phase] += seconds
        self._line = line_total, line_samples
        self._pending.clear()
        # Only now: the reading itself may have waited for long.
        self._looked_s = time.perf_counter()

    @property
    def seconds(self) -> float:
        """Seconds since the epoch began, those before a stop included."""
        return self._before_s + time.perf_counter() - self._start_s

    @property
    def mean_loss(self) -> float:
        """Mean loss of the samples read so far; NaN if there are none."""
        return self.total / self.samples if self.samples else float("nan")

    def take_line(self) -> dict[str, float]:
        """Begin a new line of metrics; return the loss, speed and rate of the one that ends."""
        self.look()
        total, samples = self._line
        now_s = time.perf_counter()
        # A line may follow another so closely that the clock has not moved.
        speed = samples / max(now_s - self._line_start_s, 1e-9)
        self._line, self._line_start_s = (0.0, 0), now_s
        loss = total / samples if samples else math.nan
        return {"loss": loss, "samples_per_s": speed, "lr": self.rate}

    def saved(self) -> dict[str, float]:
        """The numbers that a checkpoint in the middle of the epoch keeps."""
        # All steps so far are part of the checkpoint, so their losses must be in it as well.
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
