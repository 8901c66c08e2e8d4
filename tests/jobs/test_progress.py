from __future__ import annotations

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
@for_each("is_lead", [True, False])
def test_the_bar_of_the_lead_counts(devices: int, words: str, done: int, is_lead: bool) -> None:
    trainer: Any = SimpleNamespace(is_lead=is_lead, devices=(torch.device("cpu"),) * devices)
    bar = TrainingBar(trainer, samples=40, epochs=3, done=done)
    console = Console(width=100, force_terminal=True, color_system=None)
    bar.progress.live.console = console
    with console.capture() as shown, bar:
        for number in range(6):
            step: Any = SimpleNamespace(samples=10, epoch=number // 4)
            bar.advance(step, mean_loss=1 / (number + 1))
    if is_lead:
        (task,) = bar.progress.tasks
        assert (task.completed, task.total) == (done + 60, 120)
        assert words in shown.get()
        assert "epoch 2/3  loss 0.167" in shown.get()
    else:
        assert shown.get() == ""
