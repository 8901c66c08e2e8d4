"""The timeline's file, and what each process of a run writes into its part of it, and when."""

from __future__ import annotations

import atexit
import json
import os
import shutil
import subprocess
import sys
from collections import defaultdict
from collections.abc import Callable
from pathlib import Path
from typing import Any, cast

import pytest
import torch

from onefold.core.assignment import Devices
from onefold.core.options import LaunchContext
from onefold.tools import profile
from onefold.tools.profile import PROFILED_STEPS, Profile
from onefold.watch.timeline import TimelinePart, check_timeline, join_timeline, name_row, slice_of
from onefold.watch.timing import Moment, Span, Stopwatch
from tests.tables import for_each

CPU = torch.device("cpu")
Begin = Callable[..., Profile]


# A process's part


class Event:
    """A moment on a device's own clock; it has come when the device says so."""

    def __init__(self, at_s: float, *, past: bool = True) -> None:
        self.at_s, self.past, self.waited = at_s, past, 0

    def query(self) -> bool:
        return self.past

    def synchronize(self) -> None:
        self.waited += 1

    def elapsed_time(self, other: Event) -> float:
        return 1000 * (other.at_s - self.at_s)


class DeviceWatch(Stopwatch):
    """Of a device whose clock shows 100 seconds as the profile begins, and the host's 7."""

    def now(self) -> Moment:
        return cast(Moment, Event(100.0))


@pytest.fixture
def begin(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Begin:
    monkeypatch.setattr(profile, "host_now_s", lambda: 7.0)
    monkeypatch.setattr(atexit, "register", lambda call: None)

    def make(*own: int, trainer: int = 0, kind: type[Stopwatch] = Stopwatch) -> Profile:
        numbers = own or (0,)
        devices = Devices(all=(CPU,) * 4, own=numbers, context=LaunchContext(), trainer=trainer)
        return Profile(tmp_path, devices, {number: kind(CPU) for number in numbers})

    return make


def written(folder: Path) -> list[dict[str, Any]]:
    (part,) = folder.glob("*.part")
    return [json.loads(line) for line in part.read_text().splitlines()]


def slices(folder: Path) -> list[tuple[str, float, float]]:
    """Name, start and end in seconds."""
    found = [event for event in written(folder) if event["ph"] == "X"]
    return [(e["name"], e["ts"] / 1e6, (e["ts"] + e["dur"]) / 1e6) for e in found]


def spans(*bounds: tuple[float, float]) -> list[Span]:
    return [Span("forward", f"work {n}", start, stop) for n, (start, stop) in enumerate(bounds)]


def device_span(start_s: float, stop_s: float, *, past: bool = False) -> tuple[Event, list[Span]]:
    """Work on a device with its own clock, and its end."""
    stop = Event(stop_s, past=past)
    return stop, [Span("forward", "work", cast(Moment, Event(start_s)), cast(Moment, stop))]


def test_each_device_has_a_row_with_its_name_and_its_work(begin: Begin, tmp_path: Path) -> None:
    begin(2, 3, trainer=5).add_step(4, {2: spans((1.0, 2.0)), 3: spans((1.5, 3.0))})
    assert [path.name for path in tmp_path.iterdir()] == ["5-2.part"]
    names = [(e["pid"], e["tid"], e["args"]) for e in written(tmp_path)[1:6:3]]
    assert names == [(5, 2, {"name": "device 2 (cpu)"}), (5, 3, {"name": "device 3 (cpu)"})]
    rows = [(e["pid"], e["tid"], e["name"], e["cat"], e["args"]) for e in written(tmp_path)[6:]]
    assert rows == [
        (5, device, name, kind, {"step": 4})
        for device in (2, 3)
        for name, kind in (("step 4", "step"), ("work 0", "forward"))
    ]


def test_a_step_spans_its_work_and_not_the_step_before(begin: Begin, tmp_path: Path) -> None:
    """A viewer shows neither of two slices that overlap."""
    made = begin()
    made.add_step(1, {0: spans((1.0, 3.0))})
    made.add_step(2, {0: spans((2.0, 2.5), (2.5, 4.0))})
    made.add_step(PROFILED_STEPS + 1, {0: spans((5.0, 6.0))})  # beyond what is kept
    first = [("step 1", 1.0, 3.0), ("work 0", 1.0, 3.0)]
    second = [("step 2", 3.0, 4.0), ("work 0", 3.0, 3.0), ("work 1", 3.0, 4.0)]
    assert slices(tmp_path) == [*first, *second]


def test_a_step_that_is_not_over_is_written_with_the_next(begin: Begin, tmp_path: Path) -> None:
    made = begin(kind=DeviceWatch)
    stop, work = device_span(101.0, 101.5)
    made.add_step(1, {0: work})
    assert (slices(tmp_path), stop.waited) == ([], 0), "nobody waits for the device"
    made.add_step(2, {0: device_span(102.0, 103.0)[1]})
    assert slices(tmp_path) == [("step 1", 8.0, 8.5), ("work", 8.0, 8.5)]


@for_each("end", ["past", "never", "failed"])
def test_the_last_step_is_written_at_the_end_if_it_is_over(
    end: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """If the run has failed, the device may never come to an end, or every query is an error."""
    calls: list[Callable[[], None]] = []
    monkeypatch.setattr(atexit, "register", calls.append)
    caplog.set_level("INFO", logger="onefold")
    devices = Devices(all=(CPU,), own=(0,), context=LaunchContext(), trainer=0)
    stop, work = device_span(101.0, 102.0)
    Profile(tmp_path, devices, {0: DeviceWatch(CPU)}).add_step(1, {0: work})
    stop.past = end == "past"
    if end == "failed":
        error = RuntimeError("CUDA error: an illegal memory access was encountered")
        monkeypatch.setattr(Event, "query", lambda self: (_ for _ in ()).throw(error))
    calls[0]()
    assert [name for name, _, _ in slices(tmp_path)] == ["step 1", "work"] * (end == "past")
    assert bool(stop.waited) == (end == "past")
    words = "the timeline lacks the last step: CUDA error"
    assert (words in caplog.text) == (end == "failed")


# The file


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


def read(path: Path | None) -> list[dict[str, Any]]:
    assert path is not None
    return json.loads(path.read_text())["traceEvents"]


def test_parts_become_one_file(tmp_path: Path, parts: Path) -> None:
    for row in (1, 0):
        write_part(parts, row)
    with (parts / "0-0.part").open("a") as file:  # cut off where the process was killed
        file.write('{"ph": "X", "name": "b", "args": {"step": 1}')
    (tmp_path / "out").mkdir()
    path = join_timeline(parts, tmp_path / "out")
    assert list((tmp_path / "out").iterdir()) == [path] == [tmp_path / "out" / "timeline.json"]
    found = [(e["tid"], e["ts"], e["dur"], e["args"]) for e in read(path) if e["ph"] == "X"]
    assert found == [(0, 2e6, 5e5, {"step": 1}), (1, 2e6, 5e5, {"step": 1})]
    names = [e["args"]["name"] for e in read(path) if e["name"] == "thread_name"]
    assert names == ["device 0", "device 1"]
    # A timeline of ours is replaced.
    check_timeline(tmp_path / "out")
    write_part(parts, 2, "more")
    path = join_timeline(parts, tmp_path / "out")
    assert [e["name"] for e in read(path) if e["ph"] == "X"] == ["step 1", "step 1", "more"]


def test_no_work_makes_no_file(tmp_path: Path, parts: Path) -> None:
    assert join_timeline(parts, tmp_path) is None
    part = TimelinePart(parts, "0-0")
    part.append(name_row(group=0, row=0, name="device 0"))
    assert join_timeline(parts, tmp_path) is None
    assert list(tmp_path.iterdir()) == [parts]
    shutil.rmtree(parts)  # by a cleaner of temporary files: no error
    part.append(name_row(group=0, row=0, name="device 0"))


@for_each("text", ["", "notes", '{"traceEvents": []}', '{"traceEvents": [{"ph": "M", "pid": 1}]}'])
def test_what_somebody_else_wrote_is_not_replaced(text: str, tmp_path: Path) -> None:
    write_part(tmp_path, 0)
    (tmp_path / "timeline.json").write_text(text)
    with pytest.raises(ValueError, match=r"timeline\.json exists, but was not written by"):
        join_timeline(tmp_path, tmp_path)
    assert (tmp_path / "timeline.json").read_text() == text


@for_each("kind", ["link", "pipe", "folder"])
def test_a_timeline_is_written_through_no_link_or_pipe(kind: str, tmp_path: Path) -> None:
    write_part(tmp_path, 0)
    path, target = tmp_path / "timeline.json", tmp_path / "notes"
    make = {"link": lambda: path.symlink_to(target), "pipe": lambda: os.mkfifo(path)}
    make.get(kind, path.mkdir)()
    with pytest.raises(OSError, match=f"expected a file, got a .*{path}"):
        join_timeline(tmp_path, tmp_path)
    assert not target.exists()


PROGRAM = """
import torch, onefold

def main():
    model = torch.nn.Linear(3, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    trainer = onefold.Trainer(model, optimizer, lambda m, b: m(b).square().mean(dim=1), shards=4)
    for step in range(1, 6):
        if step == 4 and not trainer.is_lead:
            raise ArithmeticError("the fault that was asked for")
        trainer.step(torch.ones(8, 3))

main()
"""


@pytest.mark.processes
def test_a_run_writes_a_row_for_each_device_also_where_it_fails(tmp_path: Path) -> None:
    script, folder = tmp_path / "train.py", tmp_path / "profile"
    script.write_text(PROGRAM)
    command = [sys.executable, "-m", "onefold", "run", "--devices", "cpu:2"]
    command += ["--profile", str(folder), str(script)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=600)
    assert done.returncode, done.stderr
    assert f"timeline: {folder / 'timeline.json'}" in done.stderr
    assert [path.name for path in folder.iterdir()] == ["timeline.json"]
    events = read(folder / "timeline.json")
    names = {e["tid"]: e["args"]["name"] for e in events if e["name"] == "thread_name"}
    assert names == {0: "device 0 (cpu)", 1: "device 1 (cpu)"}
    rows = defaultdict(list)
    for event in events:
        if event["ph"] == "X":
            rows[event["tid"]].append(event)
    assert list(rows) == [0, 1]
    for device, row in rows.items():
        whole = next(event for event in row if event["name"] == "step 2")
        end = whole["ts"] + whole["dur"] + 0.01
        inside = [event for event in row if event["args"]["step"] == 2]
        assert all(whole["ts"] <= e["ts"] and e["ts"] + e["dur"] <= end for e in inside)
        first = {event["name"] for event in row if event["args"]["step"] == 1}
        shards = (2 * device, 2 * device + 1)
        assert {f"{way} shard {s}" for way in ("forward", "backward") for s in shards} <= first
        assert {"step 1", "batch", "publish", "collect", "update", "publish parameters"} <= first
        assert max(event["args"]["step"] for event in row) == 3
