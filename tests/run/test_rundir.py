"""What a launcher and its workers share: reports, and logs."""

from __future__ import annotations

import os
from contextlib import closing
from pathlib import Path

from onefold.run.rundir import Board, Logs, Report, write_report
from tests.tables import for_each


def report(text: str) -> Report:
    return Report(
        rank=1,
        step=7,
        time_s=12.25,
        kind="KeyError",
        text=text,
        traceback='File "train.py", line 3\n',
        caused_by_peer=False,
    )


def test_the_last_whole_report_of_a_device_counts_and_lies_in_no_folder() -> None:
    with closing(Board(3)) as board:
        for text in ("the first, which is longer", "", "über 'zwei'\nZeilen {}", "\0"):
            write_report(board.reports[1], report(text))
            assert (board.report(1), board.report(0)) == (report(text), None)
        os.ftruncate(board.reports[1], os.fstat(board.reports[1]).st_size - 1)
        assert board.report(1) is None
        for descriptor in (board.table, board.store, *board.reports):
            assert os.fstat(descriptor).st_nlink == 0
            assert not os.get_inheritable(descriptor)


def write_all(logs: Logs, ranks: range, text: bytes) -> None:
    for rank in ranks:
        descriptor = logs.descriptor(rank)
        assert descriptor is not None
        os.write(descriptor, text)


@for_each("there", [True, False])
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
