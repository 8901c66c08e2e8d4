from __future__ import annotations

import io
import re
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from rich.console import Console
from rich.progress import Progress, Task

import onefold
from onefold.jobs.progress import (
    ReadingBar,
    SpeedColumn,
    TrainingBar,
    epoch_line,
    phase_shares,
)
from tests.small import make_trainer, points
from tests.tables import for_each

PHASES = ("data", "forward", "backward", "exchange", "update")


def device(*seconds: float) -> dict[str, Any]:
    return {"device": "cpu", **dict(zip(PHASES, seconds, strict=True))}


def line(**changes: Any) -> dict[str, Any]:
    """A line of metrics, as a training writes one for each epoch."""
    return {
        "epoch": 1,
        "loss": 0.123456,
        "scores": {"loss": 0.23456, "accuracy": 0.98765},
        "lr": 0.04567,
        "train_s": 9.25,
        "evaluate_s": 0.5,
        "devices": [device(1, 4, 3, 1, 1), device(2, 3, 3, 2, 0)],
        **changes,
    }


def bar_of(
    *, is_lead: bool = True, devices: int = 2, done: int = 0, width: int = 100
) -> tuple[TrainingBar, Console]:
    """A bar of 3 epochs of 40 samples, on a screen that is recorded."""
    trainer: Any = SimpleNamespace(is_lead=is_lead, devices=(torch.device("cpu"),) * devices)
    bar = TrainingBar(trainer, samples=40, epochs=3, done=done)
    console = Console(width=width, force_terminal=True, color_system=None)
    bar.progress.live.console = console
    return bar, console


def step(samples: int = 10, epoch: int = 0) -> Any:
    return SimpleNamespace(samples=samples, epoch=epoch)


def test_files_that_are_read_are_one_line_where_nobody_looks() -> None:
    console = Console(file=io.StringIO(), width=100)
    with ReadingBar(console) as bar:
        for done in range(1, 4):
            bar.watch(done, 3)
    assert console.file.getvalue() == "onefold: reading 3 files\n"  # type: ignore[attr-defined]


def test_files_that_are_read_are_a_bar_on_a_terminal() -> None:
    console = Console(file=io.StringIO(), width=100, force_terminal=True, color_system=None)
    with ReadingBar(console) as bar:
        for done in range(1, 4):
            bar.watch(done, 3000)
    shown = console.file.getvalue()  # type: ignore[attr-defined]
    assert "reading files" in shown
    assert "3/3000" in shown
    assert "onefold: reading" not in shown


def test_where_nothing_is_read_nothing_is_shown() -> None:
    console = Console(file=io.StringIO(), width=100, force_terminal=True)
    with ReadingBar(console):
        pass
    assert console.file.getvalue() == ""  # type: ignore[attr-defined]


def test_an_epoch_is_told_in_one_line() -> None:
    assert epoch_line(line(), 30) == (
        "epoch  2/30  loss 0.1235  test loss 0.2346  accuracy 98.77%  lr 0.046  9.8 s  "
        "data 15%, computing 70%, exchange 15%"
    )


@for_each(("epochs", "words"), [(9, "epoch 2/9 "), (100, "epoch   2/100 ")])
def test_the_lines_of_all_epochs_are_as_long(epochs: int, words: str) -> None:
    assert epoch_line(line(), epochs).startswith(words)


def test_scores_that_are_no_numbers_are_told_as_such() -> None:
    told = epoch_line(line(loss=float("nan"), scores={"accuracy": float("nan")}), 3)
    assert "loss nan  accuracy nan%" in told


@for_each(
    ("devices", "shares"),
    [
        ([device(1, 0, 0, 0, 0)], (1.0, 0.0, 0.0)),
        ([device(0, 1, 2, 0, 1)], (0.0, 1.0, 0.0)),
        ([device(0, 1, 1, 1, 1), device(4, 0, 0, 0, 0)], (0.5, 0.375, 0.125)),
        ([device(0, 0, 0, 0, 0)], (0.0, 0.0, 0.0)),
    ],
)
def test_shares_are_of_the_time_of_all_devices(
    devices: list[dict[str, Any]], shares: tuple[float, ...]
) -> None:
    assert tuple(phase_shares(devices).values()) == shares
    assert list(phase_shares(devices)) == ["data", "computing", "exchange"]


def task_of(**values: Any) -> Task:
    progress = Progress(SpeedColumn(), disable=True)
    progress.add_task("", total=10)
    (task,) = progress.tasks
    for name, value in values.items():
        setattr(task, name, value)
    return task


def test_a_speed_is_told_once_it_is_known() -> None:
    assert SpeedColumn().render(task_of()).plain == ""
    assert SpeedColumn().render(task_of(finished_speed=12345.6)).plain == "12,346 samples/s"


@for_each(("devices", "words"), [(1, "1 device "), (3, "3 devices ")])
def test_the_bar_says_how_many_devices_there_are(devices: int, words: str) -> None:
    bar, console = bar_of(devices=devices)
    with console.capture() as shown, bar:
        pass
    assert words in shown.get()


def test_the_bar_counts_samples_and_tells_the_epoch_and_its_loss() -> None:
    bar, console = bar_of()
    with console.capture() as shown, bar:
        for number in range(6):
            bar.advance(step(epoch=number // 4), mean_loss=1 / (number + 1))
    (task,) = bar.progress.tasks
    assert (task.completed, task.total) == (60, 120)
    assert "epoch 2/3  loss 0.167" in shown.get()


def test_a_run_that_goes_on_begins_where_it_was() -> None:
    bar, _ = bar_of(done=40)
    (task,) = bar.progress.tasks
    assert (task.completed, task.total) == (40, 120)
    bar.advance(step(), mean_loss=0.5)
    assert task.completed == 50


def test_lines_come_above_the_bar_as_they_are() -> None:
    bar, console = bar_of(width=30)
    text = "loss [bold]0.5[/bold] " + "of many words " * 5 + "/tmp/a"
    with console.capture() as shown, bar:
        bar.say(text)
    assert text in re.sub(r"\x1b\[[0-9?]*[a-zA-Z]|\r", "", shown.get())


def test_other_processes_show_nothing() -> None:
    bar, console = bar_of(is_lead=False)
    with console.capture() as shown, bar:
        bar.advance(step(), mean_loss=0.5)
        bar.say("a line")
    assert shown.get() == ""


def test_a_failure_takes_the_bar_down() -> None:
    bar, console = bar_of()
    with console.capture(), pytest.raises(KeyError, match="a label"), bar:
        raise KeyError("a label")
    assert not bar.progress.live.is_started


def test_a_trainers_own_steps_move_the_bar(capsys: pytest.CaptureFixture[str]) -> None:
    trainer = make_trainer(devices=2)
    with TrainingBar(trainer, samples=9, epochs=1) as bar:
        done: onefold.Step = trainer.step(points(9))
        bar.advance(done, mean_loss=float(done.loss))
    (task,) = bar.progress.tasks
    assert task.finished
    assert f"epoch 1/1  loss {float(done.loss):.3f}" in capsys.readouterr().out
