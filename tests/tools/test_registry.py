"""The list of tools: a new one is one line, and each reason for the order."""

import itertools
import json
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.data import TensorDataset

import onefold
from onefold.core.options import LaunchContext, RunOptions
from onefold.exchange.progress import Progress
from onefold.launcher import membership
from onefold.session import forming
from onefold.step.hook import Attempt, Hook
from onefold.tools import registry
from tests.checkpoint.inprocess import new_progress
from tests.small import line, make_trainer, points, sgd


class LaunchCounts(Hook):
    """Counts the operations that shards launch."""

    def __init__(self) -> None:
        self.counts: list[int] = []

    @contextmanager
    def around_compute(self, attempt: Attempt) -> Iterator[None]:
        with Counting() as counting:
            yield
        self.counts.append(counting.count)


class Counting(TorchDispatchMode):
    count = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.count += 1
        return func(*args, **(kwargs or {}))


@pytest.fixture
def launches(monkeypatch: pytest.MonkeyPatch) -> LaunchCounts:
    hook, module = LaunchCounts(), ModuleType("onefold.tools.launches")
    module.prepare = lambda start: lambda run: hook  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, module.__name__, module)
    line = registry.Tool("launches", lambda context: True)
    monkeypatch.setattr(registry, "TOOLS", (*registry.TOOLS, line))
    return hook


def test_a_new_tool_is_one_module_and_one_line(launches: LaunchCounts) -> None:
    """Four shards launch about four times as many operations as one; some steps check more."""
    for shards in (1, 4):
        make_trainer(shards=shards).step(points(8))
    one, four = launches.counts
    assert 2 * one < four < 6 * one


def given(monkeypatch: pytest.MonkeyPatch, **options: Any) -> None:
    context = LaunchContext(options=RunOptions(**options))
    monkeypatch.setattr(forming, "_trainers", itertools.count())
    monkeypatch.setattr("onefold.trainer.current_context", lambda: context)


@pytest.fixture
def progress(monkeypatch: pytest.MonkeyPatch) -> Iterator[Progress]:
    monkeypatch.setattr(membership, "members", membership.Members())
    with new_progress(1) as table:
        for name in ("progress_of", "places_of"):
            monkeypatch.setattr(registry, name, lambda context: table)
        yield table


def test_a_comparison_has_the_step_that_ends_the_script(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    verify = {"folder": str(tmp_path), "run": "0", "steps": 1, "trainers": 1, "records": True}
    monkeypatch.setattr("onefold.tools.verifying._progress", [])
    given(monkeypatch, tools={"verify": verify})
    with pytest.raises(SystemExit):
        make_trainer().step(points(8))
    lines = (tmp_path / "0-0.jsonl").read_text().splitlines()
    assert [json.loads(each)["step"] for each in lines] == [0, 1]


def test_a_checkpoint_has_what_functions_of_the_script_write(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, progress: Progress
) -> None:
    """Asked to stop, a run is saved at the end of an epoch as soon as its last step is done."""
    given(monkeypatch, checkpoint=str(tmp_path), save_every=100, stops_after=2)
    trainer, saved = make_trainer(), []
    trainer.on_step(lambda step: saved.append(any(tmp_path.glob("step-*"))))
    loader = trainer.loader(TensorDataset(*points(8)), batch_size=4)
    for _ in trainer.epochs(1):
        for batch in loader:
            trainer.step(batch)
    trainer.close()
    assert saved == [False, False]
    assert any(tmp_path.glob("step-*"))


def test_a_model_that_cannot_be_saved_takes_no_directory(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, progress: Progress
) -> None:
    given(monkeypatch, checkpoint=str(tmp_path), save_every=100)
    optimizer = sgd(model := line())
    optimizer.param_groups[0]["names"] = object()
    with pytest.raises(TypeError, match="names of the optimizer's group 0"):
        make_trainer(model, optimizer=optimizer)
    assert list(tmp_path.iterdir()) == []


def test_what_fails_after_a_step_is_reported_as_in_the_next(
    monkeypatch: pytest.MonkeyPatch, progress: Progress
) -> None:
    def fail(step: onefold.Step) -> None:
        raise ValueError("of the script")

    trainer = make_trainer()
    trainer.on_step(fail)
    with pytest.raises(ValueError, match="of the script"):
        trainer.step(points(8))
    assert progress.step_of(0) == 2
