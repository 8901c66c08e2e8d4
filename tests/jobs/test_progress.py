from __future__ import annotations

import re
from types import SimpleNamespace
from typing import Any

import torch
from rich.console import Console

from onefold.jobs.progress import TrainingBar, epoch_line
from tests.tables import for_each

PHASES = ("data", "forward", "backward", "exchange", "update")


def device(*seconds: float) -> dict[str, Any]:
    return {"device": "cpu", **dict(zip(PHASES, seconds, strict=True))}


def line(**changes: Any) -> dict[str, Any]:
    """A line of metrics, as a training writes one for each epoch."""
    scores = {"loss": 0.23456, "accuracy": 0.98765}
    times = {"lr": 0.04567, "train_s": 9.25, "evaluate_s": 0.5}
    devices = [device(1, 4, 3, 1, 1), device(2, 3, 3, 2, 0)]
    return {"epoch": 1, "loss": 0.1234, "scores": scores, **times, "devices": devices, **changes}


def bar_of(
    *, is_lead: bool = True, devices: int = 2, done: int = 0, width: int = 100
) -> tuple[TrainingBar, Console, Any]:
    """A bar of 3 epochs of 40 samples on a screen that is recorded, and its task."""
    trainer: Any = SimpleNamespace(is_lead=is_lead, devices=(torch.device("cpu"),) * devices)
    bar = TrainingBar(trainer, samples=40, epochs=3, done=done)
    console = Console(width=width, force_terminal=True, color_system=None)
    bar.progress.live.console = console
    return bar, console, bar.progress.tasks[0]


def step(epoch: int = 0) -> Any:
    return SimpleNamespace(samples=10, epoch=epoch)


def test_an_epoch_is_told_in_one_line() -> None:
    assert epoch_line(line(), 30) == (
        "epoch  2/30  loss 0.1234  test loss 0.2346  accuracy 98.77%  lr 0.046  9.8 s  "
        "data 15%, computing 70%, exchange 15%"
    )
    assert epoch_line(line(), 9).startswith("epoch 2/9 ")
    assert epoch_line(line(), 100).startswith("epoch   2/100 ")
    told = epoch_line(line(loss=float("nan"), scores={"accuracy": float("nan")}), 3)
    assert "loss nan  accuracy nan%" in told


@for_each(("devices", "words"), [(1, "1 device "), (3, "3 devices ")])
@for_each("done", [0, 40])
def test_the_bar_counts_samples_and_tells_the_loss(devices: int, words: str, done: int) -> None:
    bar, console, task = bar_of(devices=devices, done=done)
    assert (task.completed, task.total) == (done, 120)
    with console.capture() as shown, bar:
        for number in range(6):
            bar.advance(step(epoch=number // 4), mean_loss=1 / (number + 1))
    assert task.completed == done + 60
    assert words in shown.get()
    assert "epoch 2/3  loss 0.167" in shown.get()


def test_lines_come_above_the_bar_as_they_are_and_from_the_lead_alone() -> None:
    text = "loss [bold]0.5[/bold] " + "of many words " * 5 + "/tmp/a"
    for is_lead in (True, False):
        bar, console, _ = bar_of(is_lead=is_lead, width=30)
        with console.capture() as shown, bar:
            bar.advance(step(), mean_loss=0.5)
            bar.say(text)
        found = re.sub(r"\x1b\[[0-9?]*[a-zA-Z]|\r", "", shown.get())
        assert text in found if is_lead else found == ""
