"""Shows and measures the progress of a run: bars, epoch lines, losses, times, and the time limit.

Note: when a loss is read
-------------------------
Reading the loss of a step blocks Python until the GPU has computed it, and no further work is
queued meanwhile. So steps are only collected, and read together every half second, for a line of
events, or for a checkpoint. Their losses are still added in the order of the steps.
"""

from __future__ import annotations

import math
import sys
import threading
import time
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from datetime import timedelta
from typing import Any, TextIO, final

from tqdm import tqdm

import onefold
from onefold.cli import counted, visible
from onefold_jobs.audience import audience, spelled, tell
from onefold_jobs.scores import is_share

__all__ = ["PHASES", "Meter", "TimeLimit", "TrainingBar", "epoch_line", "reading_bar"]

PHASES = ("data", "forward", "backward", "exchange", "update")
"""Phases of a step; see `onefold.Step.seconds`."""
_QUIET_S = 30.0
"""Maximum time without output if there is no bar, in seconds."""
_BAR_S = 0.25
"""Minimum time between two states of a bar, in seconds."""
_FORMAT = "{desc}  {percentage:3.0f}%|{bar}| {rate_fmt}, {remaining} left"
_COMPUTING = ("forward", "backward", "update")


class _Bar(tqdm):  # type: ignore[misc]  # it has no types
    monitor_interval = 0  # no thread that outlives the bar


def _bar(stream: TextIO, **settings: Any) -> Any:
    """Make a bar of plain text, which notebooks show as terminals do; None for a file.

    A notebook shows what its devices print, and their stdout is no terminal there.
    """
    if not (stream.isatty() or audience().notebook):
        return None
    _Bar.set_lock(threading.RLock())  # the default is a semaphore of several processes
    return _Bar(file=stream, dynamic_ncols=True, mininterval=_BAR_S, **settings)


@contextmanager
def reading_bar() -> Iterator[Callable[[int, int], None]]:
    """Show how many files have been read: a bar, or one line without a terminal or notebook.

    Yields:
        A function to call with the number of files read and the total number, from one thread.
    """
    bars: list[Any] = []

    def watch(done: int, total: int) -> None:
        # Start with the first report, so that data without files to scan show no bar.
        if not bars:
            # stdout is for results, such as predictions that are piped to another program.
            bars.append(_bar(sys.stderr, total=total, desc="reading files", leave=False))
            if bars[0] is None:
                tell(f"reading {counted(total, 'file')}")
        if bars[0] is not None:
            bars[0].update(done - bars[0].n)

    try:
        yield watch
    finally:
        for bar in filter(None, bars):
            bar.close()


@final
class TrainingBar:
    """Shows the progress of a training in a ``with`` block, on the lead only.

    In a terminal or a notebook it is a bar, in a file an occasional line.

    Args:
        trainer: trainer of the run.
        samples: number of training samples.
        epochs: total number of epochs.
        done: number of samples that the run trained on before it was resumed.
    """

    def __init__(
        self, trainer: onefold.Trainer, *, samples: int, epochs: int, done: int = 0
    ) -> None:
        self.epochs = epochs
        self._is_lead = trainer.is_lead
        self._done, self._total = done, samples * epochs
        self._shown_s = time.monotonic()
        # Begin after the first step, which may take minutes to compile.
        self._begun: tuple[int, float] | None = None
        self._devices = counted(len(trainer.devices), "device")
        self._bar = None
        if trainer.is_lead:
            self._bar = _bar(
                sys.stdout, total=self._total, initial=done, unit=" samples", bar_format=_FORMAT
            )

    def __enter__(self) -> TrainingBar:
        return self

    def __exit__(self, *exception: object) -> None:
        if self._bar is not None:
            self._bar.close()

    def advance(self, step: onefold.Step, *, mean_loss: float) -> None:
        """Count one step; ``mean_loss`` is the epoch's mean loss so far, NaN if none was read
        yet."""
        state = f"epoch {step.epoch + 1}/{self.epochs}"
        if not math.isnan(mean_loss):  # NaN until the first losses are read
            state += f"  loss {mean_loss:.3f}"
        self._done += step.samples
        if self._bar is not None:
            self._bar.set_description_str(f"{self._devices}  {state}", refresh=False)
            self._bar.update(step.samples)
        elif time.monotonic() - self._shown_s > _QUIET_S:
            self.say(state + self._pace())
        if self._begun is None:
            self._begun = self._done, time.monotonic()

    def _pace(self) -> str:
        pace = f"  {self._done / self._total:.0%}"
        if self._begun is not None:
            samples, start_s = self._begun
            speed = (self._done - samples) / (time.monotonic() - start_s)
            left = timedelta(seconds=round((self._total - self._done) / speed))
            pace += f"  {speed:,.0f} samples/s  {left} left"
        return pace

    def say(self, text: str) -> None:
        """Print a line above the bar."""
        if self._is_lead:
            self._shown_s = time.monotonic()
            text = visible(spelled(text))
            print(text, flush=True) if self._bar is None else _Bar.write(text, file=sys.stdout)


def epoch_line(line: dict[str, Any], epochs: int) -> str:
    """Describe an epoch in one line: losses, scores, learning rate, seconds, and their phases."""
    scores = "  ".join(_score(name, value) for name, value in line["scores"].items())
    shares = phase_shares(line["devices"])
    return (
        f"epoch {line['epoch']:>{len(str(epochs))}}/{epochs}  loss {line['loss']:.4f}  "
        f"{scores}  lr {line['lr']:.2g}  {line['train_s'] + line['evaluate_s']:.1f} s  "
        f"data {shares['data']:.0%}, computing {shares['computing']:.0%}, "
        f"exchange {shares['exchange']:.0%}"
    )


def phase_shares(devices: list[dict[str, Any]]) -> dict[str, float]:
    """Return the fractions of time spent waiting for data, computing and exchanging."""
    # Summed over devices first, so that a device that waits for others counts proportionally.
    sums = {
        "data": sum(device["data"] for device in devices),
        "computing": sum(device[phase] for device in devices for phase in _COMPUTING),
        "exchange": sum(device["exchange"] for device in devices),
    }
    whole = sum(sums.values()) or 1.0
    return {name: value / whole for name, value in sums.items()}


def _score(name: str, value: float) -> str:
    if name == "loss":
        return f"test loss {value:.4f}"
    return f"{name} {value:.2%}" if is_share(name) else f"{name} {value:.4g}"


_LOOK_S = 0.5
"""Interval between reads of losses and times, in seconds."""
_GLANCE_S = 1.0
"""Maximum interval between checks of the lead's clock, in seconds, by the measured speed."""


class Meter:
    """Sums of losses, samples and seconds over the steps of an epoch.

    Args:
        so_far: result of `saved` if the run resumes within an epoch, otherwise empty.
    """

    def __init__(self, so_far: Mapping[str, float]) -> None:
        self._sums = defaultdict(float, so_far)
        self._pending: list[onefold.Step] = []
        self._seconds: Any = None
        now_s = self._looked_s = time.perf_counter()
        # Shift both starts back by the time that was measured before the run was stopped.
        self._start_s = now_s - so_far.get("seconds", 0.0)
        self._line_start_s = now_s - so_far.get("line_seconds", 0.0)

    def add(self, step: onefold.Step, rate: float) -> None:
        """Count a step that used this learning rate."""
        self._sums["rate"] = rate
        # Reading the step here would make Python wait for the GPU: see the note.
        self._pending.append(step)
        if time.perf_counter() - self._looked_s > _LOOK_S:
            self.look()

    def look(self) -> None:
        """Read the losses and times of the collected steps."""
        for step in self._pending:
            total = float(step.loss) * step.samples
            for line in ("", "line_"):
                self._sums[f"{line}total"] += total
                self._sums[f"{line}samples"] += step.samples
            seconds = step.seconds
            self._seconds = seconds if self._seconds is None else self._seconds + seconds
            for phase in PHASES:
                self._sums[phase] += getattr(seconds, phase)
        self._pending.clear()
        # Read the clock after these reads, which may have waited for long.
        self._looked_s = time.perf_counter()

    @property
    def phases(self) -> dict[str, float]:
        """Seconds in each phase of the steps read so far."""
        return {phase: self._sums[phase] for phase in PHASES}

    @property
    def limit(self) -> str:
        """The limit of the steps read so far and a remedy, in words; empty if they are balanced.

        If the run resumes within an epoch, earlier steps are left out.
        """
        return "" if self._seconds is None else str(self._seconds.limit)

    def restart_limit(self) -> None:
        """Leave the steps so far out of `limit`, because something has changed."""
        self.look()
        self._seconds = None

    @property
    def mean_loss(self) -> float:
        """Mean loss of the samples read so far; NaN if there are none."""
        samples = self._sums["samples"]
        return self._sums["total"] / samples if samples else math.nan

    def whole(self) -> dict[str, float]:
        """Return loss, learning rate, seconds and speed of the epoch, including the part before a
        stop."""
        self.look()
        train_s = time.perf_counter() - self._start_s
        speed = self._sums["samples"] / train_s
        rate = self._sums["rate"]
        return {"loss": self.mean_loss, "lr": rate, "train_s": train_s, "samples_per_s": speed}

    def take_line(self) -> dict[str, float]:
        """Start a new line of events; return the loss, speed and learning rate of the previous
        one."""
        self.look()
        total, samples = self._sums.pop("line_total", 0.0), self._sums.pop("line_samples", 0.0)
        now_s = time.perf_counter()
        # Two lines may be so close that the clock has not advanced.
        speed = samples / max(now_s - self._line_start_s, 1e-9)
        self._line_start_s = now_s
        loss = total / samples if samples else math.nan
        return {"loss": loss, "samples_per_s": speed, "lr": self._sums["rate"]}

    def saved(self) -> dict[str, float]:
        """Return the numbers that a checkpoint within the epoch stores."""
        # The checkpoint includes all steps so far, so it must include their losses as well.
        self.look()
        now_s = time.perf_counter()
        passed_s = {"seconds": now_s - self._start_s, "line_seconds": now_s - self._line_start_s}
        return {**self._sums, **passed_s}


class TimeLimit:
    """Decides when the training time is over: the same on all devices, by the lead's clock.

    Args:
        trainer: trainer of the run.
        limit_s: maximum training time from now on, in seconds; may be infinite.
    """

    def __init__(self, trainer: onefold.Trainer, limit_s: float) -> None:
        self.trainer = trainer
        self._limit_s = limit_s
        self._start_s = time.perf_counter()
        self._first_step = self._next_look = trainer.steps

    def is_over(self) -> bool:
        """Whether the time is over. Called on every device, after the same steps."""
        step = self.trainer.steps
        if math.isinf(self._limit_s) or step < self._next_look:
            return False
        passed_s = time.perf_counter() - self._start_s
        left_s = self._limit_s - passed_s
        # Devices must check after the same steps, so the lead also decides the next one: checking
        # after every step would make them wait for each other.
        done = step - self._first_step
        ahead = max(1, int(done / passed_s * min(_GLANCE_S, left_s))) if done else 1
        is_over, self._next_look = self.trainer.broadcast((left_s <= 0, step + ahead))
        return bool(is_over)
