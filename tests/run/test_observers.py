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


def test_nobody_looks_on_who_was_not_asked_to(found: Found) -> None:
    assert found() == []


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
    assert lines(tmp_path / "trace") == [
        {"step": 9, "epoch": 0, "loss": 3.0, "samples": 32, "fingerprint": prints[0]},
        {"step": 10, "epoch": 1, "loss": 10 / 3, "samples": 32, "fingerprint": prints[1]},
    ]
    assert prints[0] != prints[1]


def test_values_beside_the_loss_are_written_where_there_are_some(
    found: Found, tmp_path: Path
) -> None:
    (trace,) = found(trace=str(tmp_path / "trace"))
    trace(step(1, values={"accuracy": torch.tensor(0.25, dtype=torch.float64)}), SPANS)
    trace(step(2), SPANS)
    first, second = lines(tmp_path / "trace")
    assert first["values"] == {"accuracy": 0.25}
    assert list(first) == ["step", "epoch", "loss", "samples", "values", "fingerprint"]
    assert "values" not in second


def test_a_loss_that_is_no_number_is_written_as_well(found: Found, tmp_path: Path) -> None:
    """That of a step which was skipped."""
    (trace,) = found(trace=str(tmp_path / "trace"))
    trace(step(1, loss=math.nan), SPANS)
    assert math.isnan(lines(tmp_path / "trace")[0]["loss"])


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


def test_steps_that_are_made_again_take_the_place_of_the_first_ones(
    found: Found, tmp_path: Path
) -> None:
    """A script has gone back to a checkpoint, and then on from a later one."""
    path = tmp_path / "trace"
    (trace,) = found(trace=str(path))
    for number, loss in [(1, 1.0), (2, 1.0), (3, 1.0), (2, 5.0), (3, 5.0), (7, 5.0)]:
        trace(step(number, loss), SPANS)
    found_lines = [(line["step"], line["loss"]) for line in lines(path)]
    assert found_lines == [(1, 1.0), (2, 5.0), (3, 5.0), (7, 5.0)]


# The comparison of runs


def compared(tmp_path: Path, **more: Any) -> dict[str, Any]:
    return {"probe": str(tmp_path), "probe_run": "a", "probe_steps": 2, **more}


def test_a_comparison_notes_the_begin_and_so_many_steps(found: Found, tmp_path: Path) -> None:
    (probe,) = found(**compared(tmp_path), probe_records=True)
    assert [line["step"] for line in lines(tmp_path / "a-0.jsonl")] == [0]
    for number in (11, 12, 13):  # a script may go on from a checkpoint
        probe(step(number, loss=number), SPANS)
    assert [(line["step"], line["loss"]) for line in lines(tmp_path / "a-0.jsonl")] == [
        (0, None),
        (1, 11.0),
        (2, 12.0),
    ]


@pytest.mark.parametrize(
    ("rank", "mathematics", "observers_found"), [(0, "", 1), (1, "", 0), (0, "float64", 0)]
)
def test_the_lead_notes(
    found: Found, tmp_path: Path, rank: int, mathematics: str, observers_found: int
) -> None:
    options = compared(tmp_path, probe_mathematics=mathematics)
    assert len(found(rank=rank, **options)) == observers_found
    assert (tmp_path / "a-0.jsonl").exists() is bool(observers_found)


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


def test_they_are_told_in_one_order(found: Found, tmp_path: Path) -> None:
    (tmp_path / "parts").mkdir()
    options = compared(tmp_path, trace=str(tmp_path / "trace"))
    made = found(timeline_parts=str(tmp_path / "parts"), **options)
    assert len(made) == 3
    made[0](step(1), SPANS)
    assert len(list((tmp_path / "parts").iterdir())) == 1
    made[1](step(1), SPANS)
    assert len(lines(tmp_path / "trace")) == 1
    made[2](step(1), SPANS)
    assert len(lines(tmp_path / "a-0.jsonl")) == 2
