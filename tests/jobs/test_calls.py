"""The jobs as functions of a program."""

import sys
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

import onefold_jobs
from onefold_jobs.progress import TrainingBar
from onefold_jobs.report.folder import read_run
from tests.capabilities import needs_text
from tests.jobs.tiny import SMALL, write_texts

needs_text()


@pytest.mark.processes
def test_a_job_is_a_function(tmp_path: Path) -> None:
    data, runs = write_texts(tmp_path / "data"), tmp_path / "runs"
    how: dict[str, Any] = {"runs": runs, "epochs": 2, **SMALL["text"]}
    result = onefold_jobs.text(data=data, devices=2, **how)
    assert result.folder == runs / "text-1"
    assert result.epoch in (0, 1)
    assert result.scores == read_run(result.folder).epochs[result.epoch].scores
    assert result.report is None or result.report.is_file()
    assert onefold_jobs.load_run(result.folder).classes == ("bad", "good")
    words = r"no option mixup in onefold_jobs\.text: it is one of onefold_jobs\.classify$"
    with pytest.raises(ValueError, match=words):
        onefold_jobs.text(data=data, mixup=0.2, cutmix=0.2, foreground="1")
    with pytest.raises(AttributeError, match=r"module 'onefold_jobs' has no attribute 'cook'"):
        onefold_jobs.cook  # noqa: B018


def test_where_there_is_no_terminal_a_line_comes_now_and_then(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("FORCE_COLOR", "1")  # as in a notebook
    clock = [0.0]
    monkeypatch.setattr(time, "monotonic", lambda: clock[0])
    assert not sys.stdout.isatty()
    trainer: Any = SimpleNamespace(is_lead=True, devices=("cpu", "cpu"))
    step: Any = SimpleNamespace(epoch=0, samples=10)
    with TrainingBar(trainer, samples=1000, epochs=1) as bar:
        bar.say("begun")
        for _ in range(70):
            clock[0] += 1
            bar.advance(step, mean_loss=0.5)
    told = capsys.readouterr().out.splitlines()
    assert told[0] == "begun"
    assert [line[:27] for line in told[1:]] == [
        "epoch 1/1  loss 0.500  31% ",
        "epoch 1/1  loss 0.500  62% ",
    ]
    assert all(line.endswith(" left") for line in told[1:])
    # After the first step, which may take minutes to compile, nobody knows yet.
    with TrainingBar(trainer, samples=1000, epochs=1) as bar:
        clock[0] += 100
        bar.advance(step, mean_loss=0.5)
    assert capsys.readouterr().out.splitlines() == ["epoch 1/1  loss 0.500  1%"]
