"""Who looks on while a run goes, and what it does after each step."""

from __future__ import annotations

import atexit
import json
import math
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch

from onefold.core.flat import fingerprint_of, named_tensors, tensor_digests
from onefold.core.options import RunOptions
from onefold.core.roster import Team
from onefold.core.world import World
from onefold.engine.step import Step
from onefold.run.observers import Observers
from onefold.watch.timing import Span, Stopwatch

CPU = torch.device("cpu")
SPANS = {0: [Span("forward", "forward shard 0", 1.0, 2.0)]}


@pytest.fixture(autouse=True)
def _fresh(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(atexit, "register", lambda call: None)


@pytest.fixture
def model() -> torch.nn.Module:
    torch.manual_seed(0)
    return torch.nn.Linear(2, 1)


Observer = Callable[[Step, Any], None]
Found = Callable[..., list[Observer]]


@pytest.fixture
def found(model: torch.nn.Module) -> Found:
    """The observers of one device of two."""

    def find(*, rank: int = 0, trainer: int = 0, steps: int = 0, **options: Any) -> list[Observer]:
        parts = options.pop("timeline_parts", "")
        world = replace(World(), rank=rank, size=2, timeline_parts=parts)
        world = replace(world, options=RunOptions(**options))
        team = Team(devices=(CPU, CPU), own=(rank,), world=world, trainer=trainer)
        return Observers(team, model, {rank: Stopwatch(CPU)}, steps).of_launcher

    return find


def step(number: int, loss: float = 0.5, values: dict[str, torch.Tensor] | None = None) -> Step:
    """As much of a step as is looked at."""
    made = SimpleNamespace(
        name="",
        number=number,
        epoch=number // 10,
        loss=torch.tensor(loss, dtype=torch.float64),
        samples=32,
        values=values or {},
    )
    return cast(Step, made)


def lines(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text().splitlines()]


# The trace


@pytest.mark.parametrize(("rank", "trainer"), [(1, 0), (0, 1), (1, 1)])
def test_the_trace_is_of_the_leads_first_trainer(
    found: Found, tmp_path: Path, rank: int, trainer: int
) -> None:
    assert found(rank=rank, trainer=trainer, trace=str(tmp_path / "trace")) == []
    assert not (tmp_path / "trace").exists()


def test_a_line_is_written_for_each_step(
    found: Found, tmp_path: Path, model: torch.nn.Module
) -> None:
    (trace,) = found(trace=str(tmp_path / "trace"))
    prints = []
    for number in (9, 10):
        with torch.no_grad():
            model.weight.add_(1)  # type: ignore[operator, union-attr]
        prints.append(fingerprint_of(tensor_digests(named_tensors(model))))
        trace(step(number, loss=number / 3), SPANS)
    trace(step(11, math.nan, {"accuracy": torch.tensor(0.25, dtype=torch.float64)}), SPANS)
    *first, last = lines(tmp_path / "trace")
    assert (math.isnan(last["loss"]), last["values"]) == (True, {"accuracy": 0.25})
    assert first == [
        {"step": 9, "epoch": 0, "loss": 3.0, "samples": 32, "fingerprint": prints[0]},
        {"step": 10, "epoch": 1, "loss": 10 / 3, "samples": 32, "fingerprint": prints[1]},
    ]
    assert prints[0] != prints[1]


@pytest.mark.parametrize(("done", "kept"), [(0, []), (2, [1, 2]), (9, [1, 2, 3])])
def test_a_trace_begins_where_the_run_does(
    found: Found, tmp_path: Path, done: int, kept: list[int]
) -> None:
    path = tmp_path / "trace"
    (first,) = found(trace=str(path))
    for number in (1, 2, 3):
        first(step(number), SPANS)
    found(trace=str(path), steps=done)
    assert [line["step"] for line in lines(path)] == kept


# The comparison of runs


# The timeline


def test_every_process_writes_its_part_of_the_timeline(found: Found, tmp_path: Path) -> None:
    (profile,) = found(rank=1, trainer=2, timeline_parts=str(tmp_path))
    profile(step(4), {1: SPANS[0]})
    (part,) = tmp_path.iterdir()
    assert part.name == "2-1.part"
    assert [line["name"] for line in lines(part)][-2:] == ["step 4", "forward shard 0"]


def test_a_folder_that_a_cleaner_has_removed_does_not_end_the_run(
    found: Found, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    assert found(timeline_parts=str(tmp_path / "gone")) == []
    assert "gone was removed meanwhile: this trainer is missing in the timeline" in caplog.text
