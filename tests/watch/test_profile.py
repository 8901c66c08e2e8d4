"""What a process writes into its part of the timeline, and when."""

from __future__ import annotations

import atexit
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any, cast

import pytest
import torch

from onefold.core.roster import Team
from onefold.core.world import World
from onefold.run import observers
from onefold.run.observers import PROFILED_STEPS, Profile
from onefold.watch.timing import Moment, Span, Stopwatch

CPU = torch.device("cpu")


class Event:
    """A moment on a device's own clock; it has come when the device says so."""

    def __init__(self, at_s: float, *, past: bool = True) -> None:
        self.at_s = at_s
        self.past = past
        self.waited = 0

    def query(self) -> bool:
        return self.past

    def synchronize(self) -> None:
        self.waited += 1

    def elapsed_time(self, other: Event) -> float:
        return 1000 * (other.at_s - self.at_s)


class DeviceWatch(Stopwatch):
    """Of a device whose clock shows 100 seconds as the profile begins."""

    def now(self) -> Moment:
        return moment(100.0)


def moment(at_s: float, *, past: bool = True) -> Moment:
    return cast(Moment, Event(at_s, past=past))


@pytest.fixture
def at_exit(monkeypatch: pytest.MonkeyPatch) -> list[Callable[[], None]]:
    """What the profile does at the end of the program."""
    calls: list[Callable[[], None]] = []
    monkeypatch.setattr(atexit, "register", calls.append)
    return calls


Begin = Callable[..., Profile]


@pytest.fixture
def begin(tmp_path: Path, at_exit: list[Callable[[], None]]) -> Begin:
    def make(*own: int, trainer: int = 0, kind: type[Stopwatch] = Stopwatch) -> Profile:
        numbers = own or (0,)
        team = Team(devices=(CPU,) * 4, own=numbers, world=World(), trainer=trainer)
        return Profile(tmp_path, team, {number: kind(CPU) for number in numbers})

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


# Rows


def test_each_device_has_a_row_with_its_name(begin: Begin, tmp_path: Path) -> None:
    begin(2, 3, trainer=5)
    assert [path.name for path in tmp_path.iterdir()] == ["5-2.part"]
    names = [(e["pid"], e["tid"], e["args"]) for e in written(tmp_path)[1::3]]
    assert names == [(5, 2, {"name": "device 2 (cpu)"}), (5, 3, {"name": "device 3 (cpu)"})]


def test_a_folder_that_is_gone_is_told(tmp_path: Path, at_exit: list[object]) -> None:
    team = Team(devices=(CPU,), own=(0,), world=World(), trainer=0)
    with pytest.raises(FileNotFoundError, match="gone"):
        Profile(tmp_path / "gone", team, {0: Stopwatch(CPU)})
    assert at_exit == []


# Steps


def test_a_step_spans_its_work(begin: Begin, tmp_path: Path) -> None:
    begin().add_step(3, {0: spans((2.0, 2.5), (2.5, 4.0))})
    assert slices(tmp_path) == [("step 3", 2.0, 4.0), ("work 0", 2.0, 2.5), ("work 1", 2.5, 4.0)]
    for event in written(tmp_path)[3:]:
        assert (event["pid"], event["tid"], event["args"]) == (0, 0, {"step": 3})
    assert [event["cat"] for event in written(tmp_path)[3:]] == ["step", "forward", "forward"]


def test_each_device_has_its_own_work(begin: Begin, tmp_path: Path) -> None:
    begin(0, 1).add_step(1, {0: spans((1.0, 2.0)), 1: spans((1.5, 3.0))})
    rows = [(e["tid"], e["name"]) for e in written(tmp_path) if e["ph"] == "X"]
    assert rows == [(0, "step 1"), (0, "work 0"), (1, "step 1"), (1, "work 0")]


def test_a_step_does_not_reach_back_into_the_one_before(begin: Begin, tmp_path: Path) -> None:
    """Or a viewer would show neither."""
    made = begin()
    made.add_step(1, {0: spans((1.0, 3.0))})
    made.add_step(2, {0: spans((2.0, 2.5), (2.5, 4.0))})
    assert slices(tmp_path)[2:] == [
        ("step 2", 3.0, 4.0),
        ("work 0", 3.0, 3.0),
        ("work 1", 3.0, 4.0),
    ]


def test_the_first_steps_of_a_run_are_written(begin: Begin, tmp_path: Path) -> None:
    made = begin()
    for step in (PROFILED_STEPS, PROFILED_STEPS + 1, PROFILED_STEPS + 2):
        made.add_step(step, {0: spans((float(step), step + 1.0))})
    assert [name for name, _, _ in slices(tmp_path)] == [f"step {PROFILED_STEPS}", "work 0"]


# Devices with a clock of their own


@pytest.fixture
def _at_7_seconds(monkeypatch: pytest.MonkeyPatch) -> None:
    """What the host's clock shows as a profile begins."""
    monkeypatch.setattr(observers, "host_now_s", lambda: 7.0)


def device_spans(start_s: float, stop_s: float, *, past: bool) -> list[Span]:
    return [Span("forward", "work", moment(start_s), moment(stop_s, past=past))]


@pytest.mark.usefixtures("_at_7_seconds")
def test_times_of_a_device_are_shown_on_the_clock_of_the_host(begin: Begin, tmp_path: Path) -> None:
    begin(kind=DeviceWatch).add_step(1, {0: device_spans(101.0, 101.5, past=True)})
    assert slices(tmp_path) == [("step 1", 8.0, 8.5), ("work", 8.0, 8.5)]


@pytest.mark.usefixtures("_at_7_seconds")
def test_a_step_that_is_not_over_is_written_with_the_next(begin: Begin, tmp_path: Path) -> None:
    made = begin(kind=DeviceWatch)
    first = device_spans(101.0, 102.0, past=False)
    made.add_step(1, {0: first})
    assert slices(tmp_path) == []
    assert cast(Event, first[0].stop).waited == 0, "nobody waits for the device"
    made.add_step(2, {0: device_spans(102.0, 103.0, past=False)})
    assert [name for name, _, _ in slices(tmp_path)] == ["step 1", "work"]


@pytest.mark.usefixtures("_at_7_seconds")
@pytest.mark.parametrize("past", [True, False])
def test_the_last_step_is_written_at_the_end_if_it_is_over(
    begin: Begin, tmp_path: Path, at_exit: list[Callable[[], None]], past: bool
) -> None:
    """If the run has failed, the device may never come to an end."""
    last = device_spans(101.0, 102.0, past=False)
    begin(kind=DeviceWatch).add_step(1, {0: last})
    event = cast(Event, last[0].stop)
    event.past = past
    (write_rest,) = at_exit
    write_rest()
    assert [name for name, _, _ in slices(tmp_path)] == (["step 1", "work"] if past else [])
    assert event.waited == past


def test_a_device_that_has_failed_does_not_fail_the_end(
    begin: Begin,
    tmp_path: Path,
    at_exit: list[Callable[[], None]],
    caplog: pytest.LogCaptureFixture,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    caplog.set_level("INFO", logger="onefold")
    begin(kind=DeviceWatch).add_step(1, {0: device_spans(101.0, 102.0, past=False)})

    def fail(self: Event) -> bool:
        raise RuntimeError("CUDA error: an illegal memory access was encountered")

    monkeypatch.setattr(Event, "query", fail)
    at_exit[0]()
    assert "the last step is missing in the timeline: CUDA error" in caplog.text
    assert slices(tmp_path) == []
