"""The timeline's file, and what a run writes into it."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from collections import defaultdict
from pathlib import Path
from typing import Any

import pytest

from onefold.watch.timeline import TimelinePart, check_timeline, join_timeline, name_row, slice_of

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


@pytest.fixture
def parts(tmp_path: Path) -> Path:
    """As a launcher makes it for an attempt."""
    folder = tmp_path / "parts"
    folder.mkdir()
    return folder


def write_part(parts: Path, row: int, label: str = "step 1") -> None:
    part = TimelinePart(parts, f"0-{row}")
    part.append(name_row(group=0, row=row, name=f"device {row}"))
    part.append([slice_of(label, "step", 2.0, 2.5, group=0, row=row, step=1)])


def test_parts_become_one_file(tmp_path: Path, parts: Path) -> None:
    for row in (1, 0):
        write_part(parts, row)
    (tmp_path / "out").mkdir()
    path = join_timeline(parts, tmp_path / "out")
    assert path == tmp_path / "out" / "timeline.json"
    assert [p.name for p in path.parent.iterdir()] == ["timeline.json"]
    slices = [event for event in read(path) if event["ph"] == "X"]
    assert [(e["tid"], e["ts"], e["dur"], e["args"]) for e in slices] == [
        (0, 2e6, 5e5, {"step": 1}),
        (1, 2e6, 5e5, {"step": 1}),
    ]
    names = [e["args"]["name"] for e in read(path) if e["name"] == "thread_name"]
    assert names == ["device 0", "device 1"]


def test_a_line_that_a_killed_process_has_cut_off_is_left_out(tmp_path: Path, parts: Path) -> None:
    write_part(parts, 0, "a")
    with (parts / "0-0.part").open("a") as file:
        file.write('{"ph": "X", "name": "b", "args": {"step": 1}')
    path = join_timeline(parts, tmp_path)
    assert path is not None
    assert [event["name"] for event in read(path) if event["ph"] == "X"] == ["a"]


def test_no_work_makes_no_file(tmp_path: Path, parts: Path) -> None:
    assert join_timeline(parts, tmp_path) is None
    TimelinePart(parts, "0-0").append(name_row(group=0, row=0, name="device 0"))
    assert join_timeline(parts, tmp_path) is None
    assert [path.name for path in tmp_path.iterdir()] == ["parts"]


def test_a_part_that_is_removed_meanwhile_is_no_error(parts: Path) -> None:
    part = TimelinePart(parts, "0-0")
    shutil.rmtree(parts)
    part.append(name_row(group=0, row=0, name="device 0"))


def test_a_timeline_of_ours_is_replaced(tmp_path: Path, parts: Path) -> None:
    write_part(parts, 0, "first")
    join_timeline(parts, tmp_path)
    check_timeline(tmp_path)
    write_part(parts, 1, "second")
    path = join_timeline(parts, tmp_path)
    assert path is not None
    assert [event["name"] for event in read(path) if event["ph"] == "X"] == ["first", "second"]


FOREIGN = ["", "notes", '{"traceEvents": []}', '{"traceEvents": [{"ph": "M", "pid": 1}]}']


@pytest.mark.parametrize("text", FOREIGN)
def test_what_somebody_else_wrote_is_not_replaced(tmp_path: Path, parts: Path, text: str) -> None:
    write_part(parts, 0)
    (tmp_path / "timeline.json").write_text(text)
    (tmp_path / "mine.part").write_text("mine")
    with pytest.raises(ValueError, match=r"timeline\.json is there, and is not a timeline"):
        join_timeline(parts, tmp_path)
    assert (tmp_path / "timeline.json").read_text() == text
    assert (tmp_path / "mine.part").read_text() == "mine"


@pytest.mark.parametrize("kind", ["link", "pipe", "folder"])
def test_a_timeline_is_written_through_no_link_or_pipe(
    tmp_path: Path, parts: Path, kind: str
) -> None:
    write_part(parts, 0)
    path, target = tmp_path / "timeline.json", tmp_path / "notes"
    make = {"link": lambda: path.symlink_to(target), "pipe": lambda: os.mkfifo(path)}
    make.get(kind, path.mkdir)()
    with pytest.raises(ValueError, match="expected a file, this is a link or something else"):
        join_timeline(parts, tmp_path)
    assert not target.exists()


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
    done = subprocess.run(command, capture_output=True, text=True, timeout=600)
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
