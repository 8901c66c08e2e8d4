"""Measures a training: losses and times of an epoch's steps, and when its time is over.

Note: when a loss is read
-------------------------
To read the loss of a step, Python must wait until the GPU has computed it, and meanwhile queues
no further work. So steps are only collected, and read together every half a second, for a line of
events, or for a checkpoint. The order in which they are added up stays that of the steps.
"""

from __future__ import annotations

import math
import time
from collections import defaultdict
from collections.abc import Mapping
from dataclasses import asdict

import onefold
from onefold_jobs.progress import PHASES

__all__ = ["Meter", "TimeLimit"]

_LOOK_S = 0.5
"""How long losses and times go unread while steps are made."""
_GLANCE_S = 1.0
"""How long at most the clock of the lead goes unread, as far as the speed of the steps is known."""


class Meter:
    """Sums of losses, samples and seconds over the steps of an epoch.

    Args:
        so_far: what `saved` returned, if the run resumes in the middle of an epoch; else empty.
    """

    def __init__(self, so_far: Mapping[str, float]) -> None:
        self._sums = defaultdict(float, so_far)
        self._pending: list[onefold.Step] = []
        now_s = self._looked_s = time.perf_counter()
        # As if both had begun earlier by the time that they took before the run was stopped.
        self._start_s = now_s - so_far.get("seconds", 0.0)
        self._line_start_s = now_s - so_far.get("line_seconds", 0.0)

    def add(self, step: onefold.Step, rate: float) -> None:
        """Count a step, which was made at this learning rate."""
        self._sums["rate"] = rate
        # Unread, or Python would wait for the GPU here: see the note.
        self._pending.append(step)
        if time.perf_counter() - self._looked_s > _LOOK_S:
            self.look()

    def look(self) -> None:
        """Read the losses and times of the steps that were only collected so far."""
        for step in self._pending:
            total = float(step.loss) * step.samples
            for line in ("", "line_"):
                self._sums[f"{line}total"] += total
                self._sums[f"{line}samples"] += step.samples
            for phase, seconds in asdict(step.seconds).items():
                self._sums[phase] += seconds
        self._pending.clear()
        # Only now: the reading itself may have waited for long.
        self._looked_s = time.perf_counter()

    @property
    def phases(self) -> dict[str, float]:
        """Seconds in each phase of the steps read so far."""
        return {phase: self._sums[phase] for phase in PHASES}

    @property
    def mean_loss(self) -> float:
        """Mean loss of the samples read so far; NaN if there are none."""
        samples = self._sums["samples"]
        return self._sums["total"] / samples if samples else math.nan

    def whole(self) -> dict[str, float]:
        """Return the loss, rate, seconds and speed of the epoch, those before a stop included."""
        self.look()
        train_s = time.perf_counter() - self._start_s
        speed = self._sums["samples"] / train_s
        rate = self._sums["rate"]
        return {"loss": self.mean_loss, "lr": rate, "train_s": train_s, "samples_per_s": speed}

    def take_line(self) -> dict[str, float]:
        """Begin a new line of events; return the loss, speed and rate of the one that ends."""
        self.look()
        total, samples = self._sums.pop("line_total", 0.0), self._sums.pop("line_samples", 0.0)
        now_s = time.perf_counter()
        # A line may follow another so closely that the clock has not moved.
        speed = samples / max(now_s - self._line_start_s, 1e-9)
        self._line_start_s = now_s
        loss = total / samples if samples else math.nan
        return {"loss": loss, "samples_per_s": speed, "lr": self._sums["rate"]}

    def saved(self) -> dict[str, float]:
        """The numbers that a checkpoint in the middle of the epoch keeps."""
        # All steps so far are part of the checkpoint, so their losses must be in it as well.
        self.look()
        now_s = time.perf_counter()
        passed_s = {"seconds": now_s - self._start_s, "line_seconds": now_s - self._line_start_s}
        return {**self._sums, **passed_s}


class TimeLimit:
    """Says when the time of a training is over: alike on all devices, by the clock of the lead.

    Args:
        trainer: of the run.
        limit_s: the longest that the training may take from now on; infinity never ends it.
    """

    def __init__(self, trainer: onefold.Trainer, limit_s: float) -> None:
        self.trainer = trainer
        self._limit_s = limit_s
        self._start_s = time.perf_counter()
        self._first_step = self._next_look = trainer.steps

    def is_over(self) -> bool:
        """Whether the time is over; called on every device, after the same steps."""
        step = self.trainer.steps
        if math.isinf(self._limit_s) or step < self._next_look:
            return False
        passed_s = time.perf_counter() - self._start_s
        left_s = self._limit_s - passed_s
        # Devices must look after the same steps, so the lead decides that as well: in every step
        # they would wait for each other.
        done = step - self._first_step
        ahead = max(1, int(done / passed_s * min(_GLANCE_S, left_s))) if done else 1
        is_over, self._next_look = self.trainer.broadcast((left_s <= 0, step + ahead))
        return bool(is_over)
