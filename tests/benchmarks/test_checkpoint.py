"""What a checkpoint takes: what is made of the times, and the program from end to end."""

from __future__ import annotations

import json
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest

import checkpoint
from _saving import DCP, LOAD, SAVE, TORCH_SAVE, WITH, WITHOUT, PlainSaving, Writing, bytes_of
from checkpoint import (
    IN_BACKGROUND,
    Found,
    a_step,
    arguments,
    call_of,
    file_system_of,
    others_cores,
    show,
    stall_percent,
    summary,
)
from measure import Spread, spread
from workloads import WORKLOADS

pytestmark = pytest.mark.full

MOUNTS = """/dev/vda / ext4 rw 0 0
tmpfs /tmp tmpfs rw 0 0
/dev/vdb /tmp/my\\040disk xfs rw 0 0
/dev/vdc /data ext4 rw 0 0
/dev/vdd /data btrfs rw 0 0
"""


def block(seconds: float, *, cpu_seconds: float = 0.0, **more: float) -> dict[str, float]:
    """What a process says of a block in which one core worked for it all the time."""
    return {
        "seconds": seconds,
        "cpu_seconds": cpu_seconds,
        "busy_seconds": seconds,
        "call_s": 0.0,
        "written_s": 0.0,
        "waited_s": 0.0,
        **more,
    }


def found() -> Found:
    """What the lead may say after two rounds."""
    saved = [
        block(11.0, call_s=0.5, written_s=2.0),
        block(20.4, call_s=0.25, written_s=20.4, waited_s=0.3),
    ]
    call = {"call_s": 1.0, "done_s": 2.0, "bytes": 8e6}
    return {
        "blocks": {WITH: saved, WITHOUT: [block(10.0), block(20.0)]},
        "calls": {name: [call, call] for name in (SAVE, LOAD, TORCH_SAVE, DCP)},
    }


def test_the_stall_is_taken_between_neighbours() -> None:
    stall = stall_percent([11.0, 20.4, 10.1], [10.0, 20.0, 10.0])
    assert [stall.low, stall.median, stall.high] == pytest.approx([1.0, 2.0, 10.0])


def test_a_block_is_divided_among_its_steps() -> None:
    assert a_step(spread([10.0, 20.0]), 10) == Spread(median=1.5, low=1.0, high=2.0)


def test_a_call_is_told_in_milliseconds_and_megabytes() -> None:
    call = call_of([0.5], [2.0], 8.0)
    assert call == {
        "call_ms": spread([500.0]),
        "done_ms": spread([2000.0]),
        "size_mb": 8.0,
        "mb_per_s": spread([4.0]),
    }


def test_what_all_processes_used_is_nobody_elses() -> None:
    both: list[Found] = [
        {"blocks": {WITHOUT: [block(10.0, cpu_seconds=seconds), block(4.0)]}}
        for seconds in (5.0, 3.0)
    ]
    assert others_cores(both) == [0.2, 1.0]


@pytest.mark.parametrize(
    ("path", "kind"),
    [("/tmp/a", "tmpfs"), ("/home/a/b", "ext4"), ("/data", "btrfs"), ("/tmpfile", "ext4")],
)
def test_the_file_system_is_that_of_the_nearest_mount(path: str, kind: str) -> None:
    assert file_system_of(Path(path), MOUNTS) == kind


def test_summary(capsys: pytest.CaptureFixture[str]) -> None:
    one = summary([found()], devices=1)
    assert one["size_mb"] == 8.0
    assert one["block_s"] == {WITH: spread([11.0, 20.4]), WITHOUT: spread([10.0, 20.0])}
    assert one["stall_percent"].median == pytest.approx(6.0)
    assert one["stall_ms"].median == pytest.approx(700.0)
    assert one["waited_ms"].high == pytest.approx(300.0)
    assert list(one["calls"]) == [IN_BACKGROUND, SAVE, LOAD, TORCH_SAVE, DCP]
    assert one["calls"][IN_BACKGROUND]["call_ms"] == spread([500.0, 250.0])
    assert one["calls"][IN_BACKGROUND]["mb_per_s"].high == 4.0
    assert one["calls"][LOAD]["mb_per_s"] == spread([4.0])
    show([one], title="a model", every=10)
    shown = capsys.readouterr().out
    for text in ("a model", "every 10 steps", "6.00 (2.00-10.00)", "375.0 (250.0-500.0)", DCP):
        assert text in shown
    assert "Disturbed: other programs kept 1.00 cores busy during 1 device" in shown


def test_numbers_below_one_are_refused(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit, match="2"):
        arguments(["--every", "0"])
    assert "at least one step" in capsys.readouterr().err


def test_what_is_written_in_the_background_is_waited_for() -> None:
    may_end = threading.Event()
    thread = threading.Thread(target=may_end.wait)
    thread.start()
    writing = Writing([thread], time.perf_counter())
    before_s = time.perf_counter()
    may_end.set()
    assert writing.wait() > 0.0
    assert not thread.is_alive()
    assert Writing([], before_s).wait() > 0.0


def test_plain_pytorch_saves_as_much_and_leaves_nothing(tmp_path: Path) -> None:
    workload = WORKLOADS["thousand"]
    plain = PlainSaving(workload, tmp_path)
    taken = plain.torch_save()
    parameters = sum(parameter.nbytes for parameter in workload.build()[0].parameters())
    assert taken["bytes"] > 3 * parameters  # Adam has two moments for each
    assert taken["call_s"] == taken["done_s"]
    assert not list(tmp_path.iterdir())


def test_bytes_are_those_of_all_files(tmp_path: Path) -> None:
    (tmp_path / "inner").mkdir()
    (tmp_path / "one").write_bytes(b"123")
    (tmp_path / "inner" / "two").write_bytes(b"45")
    assert bytes_of(tmp_path) == 5


@pytest.mark.processes
def test_a_small_run_leaves_a_record_and_no_checkpoints(tmp_path: Path) -> None:
    directory, output = tmp_path / "disk", tmp_path / "record.json"
    directory.mkdir()
    done = subprocess.run(
        [
            *(sys.executable, str(Path(checkpoint.__file__)), "--workload", "mlp"),
            *("--devices", "2", "1", "--every", "2", "--rounds", "2"),
            *("--directory", str(directory), "--output", str(output)),
        ],
        capture_output=True,
        text=True,
        timeout=600,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert not list(directory.iterdir())
    told = json.loads(output.read_text(encoding="utf-8"))
    assert json.loads(done.stdout.splitlines()[-1]) == told
    assert told["benchmark"] == "checkpoint"
    settings = told["settings"]
    assert (settings["every"], settings["rounds"], settings["shards"]) == (2, 2, 2)
    assert settings["goal_percent"] == 3.5
    assert [one["devices"] for one in told["results"]] == [2, 1]
    for one in told["results"]:
        assert one["size_mb"] > 0
        assert set(one["stall_percent"]) == {"median", "low", "high"}
        assert list(one["calls"]) == [IN_BACKGROUND, SAVE, LOAD, TORCH_SAVE, DCP]
        assert all(call["mb_per_s"]["low"] > 0 for call in one["calls"].values())
