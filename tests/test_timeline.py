"""The timeline's file, and what a run writes into it."""

from __future__ import annotations

import json
import subprocess
import sys
from collections import defaultdict
from pathlib import Path
from typing import Any

import pytest

from onefold.timeline import TimelinePart, join_timeline, name_row, remove_parts, slice_of

PROGRAM = """
import sys, torch, onefold

def loss(model, batch):
    return model(batch).square().mean(dim=1)

def main():
    model = torch.nn.Linear(3, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    trainer = onefold.Trainer(model, optimizer, loss, shards=4)
    for step in range(1, 6):
        if step == int(sys.argv[1]) and not trainer.is_lead:
            raise ArithmeticError("the fault that was asked for")
        trainer.step(torch.ones(8, 3))

main()
"""


def read(path: Path) -> list[dict[str, Any]]:
    events: list[dict[str, Any]] = json.loads(path.read_text())["traceEvents"]
    return events


def test_parts_become_one_file(tmp_path: Path) -> None:
    for row in (1, 0):
        part = TimelinePart(tmp_path, f"0-{row}")
        part.append(name_row(group=0, row=row, name=f"device {row}"))
        part.append([slice_of("step 1", "step", 2.0, 2.5, group=0, row=row, step=1)])
    path = join_timeline(tmp_path)
    assert path == tmp_path / "timeline.json"
    assert [p.name for p in tmp_path.iterdir()] == ["timeline.json"]
    slices = [event for event in read(path) if event["ph"] == "X"]
    assert [(e["tid"], e["ts"], e["dur"], e["args"]) for e in slices] == [
        (0, 2e6, 5e5, {"step": 1}),
        (1, 2e6, 5e5, {"step": 1}),
    ]
    names = [e["args"]["name"] for e in read(path) if e["name"] == "thread_name"]
    assert names == ["device 0", "device 1"]


def test_a_line_that_a_killed_process_has_cut_off_is_left_out(tmp_path: Path) -> None:
    TimelinePart(tmp_path, "0-0").append([slice_of("a", "b", 0, 1, group=0, row=0, step=1)])
    with (tmp_path / "0-0.part").open("a") as file:
        file.write('{"ph": "X", "name": "b", "args": {"step": 1}')
    path = join_timeline(tmp_path)
    assert path is not None
    assert [event["name"] for event in read(path)] == ["a"]


def test_no_part_makes_no_file(tmp_path: Path) -> None:
    TimelinePart(tmp_path, "0-0")
    remove_parts(tmp_path)
    assert join_timeline(tmp_path) is None
    TimelinePart(tmp_path, "0-0").append(name_row(group=0, row=0, name="device 0"))
    assert join_timeline(tmp_path) is None
    assert list(tmp_path.iterdir()) == []


def slices_by_row(events: list[dict[str, Any]]) -> dict[int, list[dict[str, Any]]]:
    rows = defaultdict(list)
    for event in events:
        if event["ph"] == "X":
            rows[event["tid"]].append(event)
    return rows


def assert_nested(row: list[dict[str, Any]]) -> None:
    """A viewer needs slices of one row to lie apart or inside one another."""
    open_until: list[float] = []
    for event in sorted(row, key=lambda e: (e["ts"], -e["dur"])):
        start, stop = event["ts"], event["ts"] + event["dur"]
        while open_until and open_until[-1] <= start + 0.01:
            open_until.pop()
        assert not open_until or stop <= open_until[-1] + 0.01, event
        open_until.append(stop)


@pytest.mark.processes
@pytest.mark.parametrize(("failing_step", "last_step"), [(0, 5), (4, 3)])
def test_a_run_writes_a_row_for_each_device(
    tmp_path: Path, failing_step: int, last_step: int
) -> None:
    script, folder = tmp_path / "train.py", tmp_path / "profile"
    script.write_text(PROGRAM)
    command = [sys.executable, "-m", "onefold", "run", "--devices", "cpu:2"]
    command += ["--profile", str(folder), str(script), str(failing_step)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120)
    assert bool(done.returncode) is bool(failing_step), done.stderr
    assert f"timeline: {folder / 'timeline.json'}" in done.stderr
    assert [path.name for path in folder.iterdir()] == ["timeline.json"]
    events = read(folder / "timeline.json")
    names = {e["tid"]: e["args"]["name"] for e in events if e["name"] == "thread_name"}
    assert names == {0: "device 0 (cpu)", 1: "device 1 (cpu)"}
    rows = slices_by_row(events)
    for device, row in rows.items():
        assert_nested(row)
        first = {event["name"] for event in row if event["args"]["step"] == 1}
        shards = {f"{way} shard {s}" for way in ("forward", "backward") for s in (0, 1)}
        theirs = {name.replace("1", "3").replace("0", "2") for name in shards}
        assert (theirs if device else shards) <= first
        assert {"step 1", "batch", "publish", "collect", "update", "spread"} <= first
        assert max(event["args"]["step"] for event in row) == last_step
