"""``--lr auto``: the sweep, what it leaves, and that it is made once."""

import json
import math
import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import onefold
from onefold.testing import simulate
from onefold_jobs import range_test, report
from onefold_jobs.options import TrainOptions, from_mapping
from onefold_jobs.range_test import choose, find_rate
from onefold_jobs.report.curves import curves_of_one
from onefold_jobs.report.folder import read_reported
from onefold_jobs.run import read_options, run_job
from onefold_jobs.training import Task
from tests.jobs.tiny import SMALL, job_of
from tests.small import bits
from tests.tables import for_each

OPTIONS: dict[str, Any] = {**SMALL["classify"], "model": "lenet", "augment": "none"}


@pytest.fixture(autouse=True)
def _short(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(range_test, "STEPS", 12)
    monkeypatch.setattr(range_test, "LEAST", 1e-5)
    monkeypatch.setattr(range_test, "GROWTH", 1e6 ** (1 / 11))


@pytest.fixture
def task_of(data: dict[str, Path], tmp_path: Path) -> Callable[..., tuple[TrainOptions, Task]]:
    """The task of a run that asks for a sweep."""

    def made(**more: Any) -> tuple[TrainOptions, Task]:
        job = job_of("classify")
        given = {"data": str(data["classify"]), "runs": str(tmp_path), "lr": "auto", **OPTIONS}
        asked = read_options(job, {**given, **more}, None)
        prepared = job.prepare(asked)
        settled = job.settle(asked, prepared)
        return settled, job.make_task(settled, prepared)

    return made


def generators() -> tuple[Any, ...]:
    return torch.get_rng_state().tolist(), str(np.random.get_state()), random.getstate()


@for_each("devices", [2, 3])
def test_a_sweep_is_the_same_on_any_number_of_devices(devices: int, task_of: Any) -> None:
    first, *others = [
        found for count in (1, devices) for found in simulate(lambda: find_rate(*task_of()), count)
    ]
    assert others == [first] * devices
    assert first.rates[0] == 1e-5
    assert 1e-6 < first.rate < 1


def test_a_sweep_leaves_the_model_and_the_generators(task_of: Any) -> None:
    options, task = task_of(freeze=("features.0",))
    before, drawn = bits(task.model), generators()
    modes = [part.training for part in task.model.modules()]
    settled, swept = range_test.with_rate(options, task)
    assert generators() == drawn
    assert bits(swept.model) == before
    assert swept.model is task.model
    assert [part.training for part in task.model.modules()] == modes
    assert all(each.requires_grad and each.grad is None for each in task.model.parameters())
    assert settled.lr == swept.facts["range_test"]["rate"]
    assert "a tenth of the one with the lowest loss in" in swept.notes[-1]


@pytest.mark.usefixtures("here")
def test_the_choice_is_kept_and_a_resumed_run_does_not_sweep_again(
    data: dict[str, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    job = job_of("classify")
    monkeypatch.setattr(report, "build_report", str)
    given = {"data": str(data["classify"]), "runs": str(tmp_path), "name": "it", **OPTIONS}
    given |= {"epochs": 1, "devices": "cpu:1", "log": "none"}
    swept = run_job(job, read_options(job, {**given, "lr": "auto"}, None))
    folder = tmp_path / "it"
    found = json.loads((folder / "run.json").read_text())["range_test"]
    assert f"lr = {found['rate']!r}" in (folder / "config.toml").read_text()
    (entry,) = (e for e in onefold.Record(folder).results if e["call"] == "trainer.broadcast")
    value: Any = entry["value"]
    assert value["range_test"]["rate"] == found["rate"]
    monkeypatch.setattr(range_test, "find_rate", lambda *_: pytest.fail("it sweeps again"))
    plain = {**given, "name": "plain", "lr": found["rate"]}
    told = run_job(job, read_options(job, plain, None))
    assert told["fingerprint"] == swept["fingerprint"]
    again = {"runs": str(tmp_path), "name": "it", "resume": True, "epochs": 2, "lr": "auto"}
    run_job(job, read_options(job, again, None))
    facts = json.loads((folder / "run.json").read_text())
    assert (facts["range_test"], facts["epochs"]) == (found, 2)


def test_the_report_shows_the_losses_by_learning_rate(runs: dict[str, Path]) -> None:
    run = read_reported(runs["classify"])
    found = {"rates": [1e-3, 1e-2, 1e-1], "losses": [2.0, 1.0, None], "rate": 1e-3}
    run.facts["range_test"] = {**found, "smoothed": [2.0, 1.4, None]}
    (chart,) = (each for each in curves_of_one(run) if "(--lr auto)" in each.title)
    assert [each.label for each in chart.lines] == ["loss", "moving average", "chosen"]
    assert chart.lines[-1].points == [(1e-3, 1.4), (1e-3, 2.0)]
    assert chart.drawing().count("<path") > 10


def test_losses_that_are_not_finite_end_a_sweep() -> None:
    found = choose([1.0, 0.9, 0.8, 0.7, math.nan])
    assert found.rate == found.rates[3] / 10
    with pytest.raises(ValueError, match="lowered the loss from 1: check the data"):
        choose([1.0, 1.1, math.inf])


@for_each(
    ("given", "words"),
    [
        ({"lr": "fast"}, "lr: expected a number or auto, got 'fast'"),
        ({"lr": "auto", "scale_lr": "linear"}, "--scale-lr linear: expected none with --lr auto"),
    ],
)
def test_what_cannot_be_swept_is_refused(given: Any, words: str) -> None:
    with pytest.raises(ValueError, match=words):
        from_mapping(job_of("text").options, given, "options")
