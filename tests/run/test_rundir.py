from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path

import pytest

from onefold.exchange.progress import Progress
from onefold.run.rundir import Board, Logs, Report, write_report
from tests.tables import for_each


@pytest.fixture
def board() -> Iterator[Board]:
    """As a launcher of three devices makes it."""
    with closing(Board(3)) as board:
        yield board


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


def test_the_launcher_sees_the_steps_of_its_workers(board: Board) -> None:
    launcher, worker = board.progress, Progress(board.table, 3)
    assert [launcher.step_of(rank) for rank in range(3)] == [-1, -1, -1]
    worker.set_step(1, 4)
    worker.set_step(2, 0)
    assert [launcher.step_of(rank) for rank in range(3)] == [-1, 4, 0]
    worker.set_step(1, 2**40)
    assert Progress(board.table, 3).step_of(1) == 2**40


def test_a_request_to_stop_is_seen_by_all(board: Board) -> None:
    worker = Progress(board.table, 3)
    assert not worker.stop_requested()
    board.progress.request_stop()
    assert worker.stop_requested()


@pytest.mark.parametrize("text", ["no such key", "", "über 'zwei'\nZeilen {}", "\0"])
def test_a_report_says_what_it_was_told(board: Board, text: str) -> None:
    write_report(board.reports[1], report(1, text))
    assert board.report(1) == report(1, text)
    assert board.report(0) is None


def test_the_last_report_of_a_device_counts(board: Board) -> None:
    write_report(board.reports[1], report(1, "first, which is longer"))
    write_report(board.reports[1], report(1, "second"))
    assert board.report(1) == report(1, "second")


def test_a_report_that_was_cut_off_is_none(board: Board) -> None:
    write_report(board.reports[1], report(1))
    os.ftruncate(board.reports[1], os.fstat(board.reports[1]).st_size - 1)
    assert board.report(1) is None


def test_a_board_lies_in_no_folder(board: Board) -> None:
    for descriptor in (board.table, board.store, *board.reports):
        assert os.fstat(descriptor).st_nlink == 0
        assert not os.get_inheritable(descriptor)


def write_all(logs: Logs, ranks: range, text: bytes) -> None:
    for rank in ranks:
        descriptor = logs.descriptor(rank)
        assert descriptor is not None
        os.write(descriptor, text)


def contents(folder: Path) -> dict[str, str]:
    return {path.name: path.read_text() for path in folder.iterdir()}


def test_logs_are_counted(tmp_path: Path) -> None:
    with closing(Logs(tmp_path / "logs", range(1, 3))) as logs:
        assert logs.size() == 0
        assert logs.descriptor(0) is None
        write_all(logs, range(1, 3), b"12345")
        assert logs.size() == 10
    assert contents(tmp_path / "logs") == {"device-1.log": "12345", "device-2.log": "12345"}


def test_logs_of_others_stay_as_they_are(tmp_path: Path) -> None:
    """Two runs at a time, one of before, and somebody's own files."""
    (tmp_path / "device-2.log").write_text("somebody's")
    (tmp_path / "report-1.json").write_text("somebody's")
    with closing(Logs(tmp_path, range(1, 3))) as one, closing(Logs(tmp_path, range(1, 2))) as two:
        write_all(one, range(1, 3), b"one")
        write_all(two, range(1, 2), b"two")
        assert (one.number, two.number) == (2, 1)
    with closing(Logs(tmp_path, range(1, 2))) as three:
        assert three.pattern == str(tmp_path / "device-*.run-3.log")
    assert contents(tmp_path) == {
        "device-1.log": "two",
        "device-2.log": "somebody's",
        "report-1.json": "somebody's",
        "device-1.run-2.log": "one",
        "device-2.run-2.log": "one",
        "device-1.run-3.log": "",
    }


@for_each("there", [True, False], ids=["a file", "nothing"])
def test_a_log_follows_no_link(tmp_path: Path, there: bool) -> None:
    target, folder = tmp_path / "notes.txt", tmp_path / "logs"
    folder.mkdir()
    if there:
        target.write_text("mine")
    (folder / "device-1.log").symlink_to(target)
    with closing(Logs(folder, range(1, 2))) as logs:
        write_all(logs, range(1, 2), b"words")
    assert (folder / "device-1.run-2.log").read_text() == "words"
    assert target.exists() == there
    assert not there or target.read_text() == "mine"


def test_a_device_that_has_ended_is_seen_by_all(board: Board) -> None:
    worker = Progress(board.table, 3)
    worker.set_step(0, 7)
    worker.set_ended(0)
    worker.set_ended(2)
    assert [board.progress.has_ended(rank) for rank in range(3)] == [True, False, True]
    assert [board.progress.step_of(rank) for rank in range(3)] == [7, -1, -1]
