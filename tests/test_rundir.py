from __future__ import annotations

from pathlib import Path

import pytest

from onefold.rundir import Report, RunDirectory


@pytest.fixture
def directory(tmp_path: Path) -> RunDirectory:
    """As a launcher of three devices makes it."""
    directory = RunDirectory(tmp_path, 3)
    directory.create()
    return directory


def report(rank: int, text: str = "no such key") -> Report:
    return Report(
        rank=rank,
        step=7,
        time_s=12.25,
        kind="KeyError",
        text=text,
        traceback='File "train.py", line 3\n',
        caused_by_peer=False,
    )


def test_the_launcher_sees_the_steps_of_its_workers(directory: RunDirectory) -> None:
    launcher, worker = directory.progress(), directory.progress()
    assert [launcher.step_of(rank) for rank in range(3)] == [-1, -1, -1]
    worker.set_step(1, 4)
    worker.set_step(2, 0)
    assert [launcher.step_of(rank) for rank in range(3)] == [-1, 4, 0]
    worker.set_step(1, 2**40)
    assert directory.progress().step_of(1) == 2**40


@pytest.mark.parametrize("text", ["no such key", "", "über 'zwei'\nZeilen {}", "\0"])
def test_a_report_says_what_it_was_told(directory: RunDirectory, text: str) -> None:
    directory.write_report(report(1, text))
    assert directory.read_report(1) == report(1, text)
    assert directory.read_report(0) is None


def test_the_last_report_of_a_device_counts(directory: RunDirectory) -> None:
    directory.write_report(report(1, "first"))
    directory.write_report(report(1, "second"))
    assert directory.read_report(1) == report(1, "second")
    assert sorted(path.name for path in directory.path.iterdir()) == ["progress", "report-1.json"]


def test_logs_are_counted(directory: RunDirectory) -> None:
    assert directory.log_sizes() == 0
    directory.log(1).write_text("12345")
    directory.log(2).write_text("")
    directory.write_report(report(1))
    assert directory.log_sizes() == 5
    assert directory.log(1) != directory.log(2)


def test_the_port_of_the_store_is_handed_on(directory: RunDirectory) -> None:
    directory.write_port(4711)
    assert directory.read_port(timeout_s=0) == 4711


def test_nobody_waits_for_a_port_without_a_limit(directory: RunDirectory) -> None:
    with pytest.raises(TimeoutError, match=r"device 0 did not open its store within 0\.02 s"):
        directory.read_port(timeout_s=0.02)
