"""Shows how far a run is: a bar while it reads or trains, and a line for each epoch."""

from __future__ import annotations

import math
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import timedelta
from typing import Any, final

from rich.console import Console
from rich.progress import (
    BarColumn,
    MofNCompleteColumn,
    Progress,
    ProgressColumn,
    Task,
    TextColumn,
    TimeRemainingColumn,
)
from rich.text import Text

import onefold
from onefold.cli import counted, tell
from onefold_jobs.scores import is_share

__all__ = ["PHASES", "TrainingBar", "epoch_line", "reading_bar"]

PHASES = ("data", "forward", "backward", "exchange", "update")
"""What the time of a step is spent on; see `onefold.Step.seconds`."""
_QUIET_S = 30.0
"""How long nothing is shown at most, where there is no bar."""
_COMPUTING = ("forward", "backward", "update")


class SpeedColumn(ProgressColumn):
    """A column with the speed in samples a second."""

    def render(self, task: Task) -> Text:
        speed = task.finished_speed or task.speed
        return Text("" if speed is None else f"{speed:,.0f} samples/s")


@contextmanager
def reading_bar() -> Iterator[Callable[[int, int], None]]:
    """Show how many files have been read: a bar on a terminal, otherwise one line.

    Yields:
        What to call with how many files of how many have been read, from one thread.
    """
    # stdout is for results, such as predictions that go to another program.
    console = Console(stderr=True)
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn())
    progress = Progress(*columns, TimeRemainingColumn(), console=console, transient=True)
    task = progress.add_task("reading files", total=None)
    begun = False

    def watch(done: int, total: int) -> None:
        nonlocal begun
        progress.update(task, completed=done, total=total)
        # With the first report and not before: data without files to look through show no bar.
        if not begun and console.is_terminal:
            progress.start()
        elif not begun:
            tell(f"reading {counted(total, 'file')}")
        begun = True

    try:
        yield watch
    finally:
        if begun and console.is_terminal:
            progress.stop()


@final
class TrainingBar:
    """Shows the progress of one training in a ``with`` block, on the lead alone.

    A bar on a terminal; in notebooks and files a line now and then.

    Args:
        trainer: the trainer of the run.
        samples: size of the training set.
        epochs: how many times the training set is read in all.
        done: how many samples the run had trained on before it was resumed.
    """

    def __init__(
        self, trainer: onefold.Trainer, *, samples: int, epochs: int, done: int = 0
    ) -> None:
        self.epochs = epochs
        # By the stream alone: a notebook claims to be a terminal, and would keep every state of the
        # bar. There and in files a line comes now and then instead.
        console = Console(force_terminal=sys.stdout.isatty())
        self._is_lead = trainer.is_lead
        self._shown_s = time.monotonic()
        self.progress = Progress(
            TextColumn("{task.description}"),
            BarColumn(),
            TextColumn("{task.fields[state]}"),
            SpeedColumn(),
            TimeRemainingColumn(),
            console=console,
            disable=not (trainer.is_lead and console.is_terminal),
        )
        devices = counted(len(trainer.devices), "device")
        self.task = self.progress.add_task(
            devices, total=samples * epochs, completed=done, state=""
        )

    def __enter__(self) -> TrainingBar:
        self.progress.start()
        return self

    def __exit__(self, *exception: object) -> None:
        self.progress.stop()

    def advance(self, step: onefold.Step, *, mean_loss: float) -> None:
        """Count one step; ``mean_loss`` is the mean of the epoch so far, NaN if not read yet."""
        state = f"epoch {step.epoch + 1}/{self.epochs}"
        if not math.isnan(mean_loss):  # or none has been looked at yet
            state += f"  loss {mean_loss:.3f}"
        self.progress.update(self.task, advance=step.samples, state=state)
        if self.progress.disable and time.monotonic() - self._shown_s > _QUIET_S:
            (task,) = self.progress.tasks
            state += f"  {task.percentage:.0f}%"
            # Known only after two steps.
            if task.speed and task.time_remaining is not None:
                left = timedelta(seconds=round(task.time_remaining))
                state += f"  {task.speed:,.0f} samples/s  {left} left"
            self.say(state)

    def say(self, text: str) -> None:
        """Print a line above the bar."""
        # Without markup: folders and models may have brackets in their names, which rich would take
        # for styles.
        if self._is_lead:
            self._shown_s = time.monotonic()
            self.progress.console.print(text, markup=False, highlight=False, soft_wrap=True)


def epoch_line(line: dict[str, Any], epochs: int) -> str:
    """Describe an epoch in one line: losses, scores, rate, seconds, and what they were spent on."""
    scores = "  ".join(_score(name, value) for name, value in line["scores"].items())
    shares = phase_shares(line["devices"])
    return (
        f"epoch {line['epoch'] + 1:>{len(str(epochs))}}/{epochs}  loss {line['loss']:.4f}  "
        f"{scores}  lr {line['lr']:.2g}  {line['train_s'] + line['evaluate_s']:.1f} s  "
        f"data {shares['data']:.0%}, computing {shares['computing']:.0%}, "
        f"exchange {shares['exchange']:.0%}"
    )


def phase_shares(devices: list[dict[str, Any]]) -> dict[str, float]:
    """Shares of the devices' time that went into waiting for data, computing and exchange."""
    # Summed over the devices first, so that one that waits for the others counts with its share.
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
