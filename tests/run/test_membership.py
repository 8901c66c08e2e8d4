"""Who hears of it when a process of a run fails, and what comes on the screen."""

from __future__ import annotations

import atexit
import gc
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from onefold.run import membership
from onefold.run.membership import abandon, at_good_end, end_well, register


class Member:
    """Notes with what it is closed."""

    def __init__(self) -> None:
        self.closed: list[BaseException | None] = []

    def close(self, failure: BaseException | None = None) -> None:
        self.closed.append(failure)


@pytest.fixture(autouse=True)
def at_exit(monkeypatch: pytest.MonkeyPatch) -> list[Callable[[], None]]:
    """A process that is part of no run yet, and what it does at its end."""
    calls: list[Callable[[], None]] = []
    monkeypatch.setattr(membership, "members", membership.Members())
    monkeypatch.setattr(atexit, "register", calls.append)
    return calls


def test_every_run_hears_of_a_failure() -> None:
    members, failure = [Member(), Member()], ArithmeticError("over the top")
    for member in members:
        register(member)
    abandon(failure)
    assert [member.closed for member in members] == [[failure]] * 2


def test_at_the_end_of_the_program_every_run_is_left(at_exit: list[Callable[[], None]]) -> None:
    members = [Member(), Member()]
    for member in members:
        register(member)
    (leave,) = at_exit
    leave()
    assert [member.closed for member in members] == [[None]] * 2


def test_a_run_that_nobody_holds_any_more_is_not_kept() -> None:
    register(Member())
    gc.collect()
    assert list(membership.members.open) == []
    abandon(ValueError("over"))


def test_a_good_end_calls_each_once_and_in_order() -> None:
    calls: list[int] = []
    for number in range(3):
        at_good_end(lambda number=number: calls.append(number))
    end_well()
    end_well()
    assert calls == [0, 1, 2]


def test_an_error_at_a_good_end_makes_it_a_bad_one() -> None:
    calls: list[str] = []

    def fail() -> None:
        raise OSError("the disk is full")

    at_good_end(fail)
    at_good_end(lambda: calls.append("after it"))
    with pytest.raises(OSError, match="the disk is full"):
        end_well()
    assert calls == []


def test_what_is_called_at_a_good_end_may_add_to_it() -> None:
    calls: list[str] = []
    at_good_end(lambda: at_good_end(lambda: calls.append("later")))
    end_well()
    assert calls == ["later"]


def test_a_forked_child_is_part_of_no_run() -> None:
    member, ended = Member(), []
    register(member)
    at_good_end(lambda: ended.append(1))
    pid = os.fork()
    if pid == 0:
        abandon(ValueError("over"))
        end_well()
        os._exit(bool(member.closed or ended))
    assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 0
    end_well()
    assert ended == [1], "its parent is, as before"


# Under a launcher that is not ours

PROGRAM = """
import os, sys
from onefold.core.world import World
from onefold.errors import PeerLost
from onefold.run.membership import hush_and_report, register

class Member:
    def close(self, failure=None):
        os.write(told, repr(failure).encode())

told = os.open(sys.argv[3], os.O_WRONLY | os.O_CREAT)
member = Member()
register(member)
hush_and_report(World(rank=int(sys.argv[1]), size=3, launcher="torch"))
print("a line of the script")
os.write(2, b"a line of a library\\n")
exec(sys.argv[2])
"""


class Ended:
    """A process of three, and what it left."""

    def __init__(self, folder: Path, rank: int, last_line: str, program: str = PROGRAM) -> None:
        done = subprocess.run(
            [sys.executable, "-c", program, str(rank), last_line, str(folder / "told")],
            capture_output=True,
            text=True,
            timeout=600,
            check=False,
            env={**os.environ, "TMPDIR": str(folder)},
        )
        self.code, self.output, self.errors = done.returncode, done.stdout, done.stderr
        self.told = (folder / "told").read_text()
        self.paths = list(folder.glob(f"onefold-device-{rank}-*/*.log"))
        self.logs = [path.read_text() for path in self.paths]
        self.folders = len(list(folder.glob("onefold-device-*")))


LINES = "a line of the script\n", "a line of a library\n"


@pytest.mark.processes
def test_the_lead_speaks_on_the_screen(tmp_path: Path) -> None:
    ended = Ended(tmp_path, 0, "")
    assert (ended.code, ended.output, ended.errors) == (0, *LINES)
    assert (ended.folders, ended.told) == (0, "None")


@pytest.mark.processes
def test_the_others_do_not_and_leave_no_log(tmp_path: Path) -> None:
    ended = Ended(tmp_path, 2, "")
    assert (ended.code, ended.output, ended.errors) == (0, "", "")
    assert (ended.folders, ended.told) == (0, "None")


@pytest.mark.processes
@pytest.mark.parametrize("rank", [0, 2])
def test_who_fails_shows_its_traceback_and_tells_the_others(tmp_path: Path, rank: int) -> None:
    ended = Ended(tmp_path, rank, "raise ArithmeticError('over the top')")
    assert ended.code == 1
    assert ended.errors.count("Traceback (most recent call last)") == 1
    trace, _, after = ended.errors.partition("ArithmeticError: over the top\n")
    assert "Traceback" in trace
    assert after == "".join(f"onefold: output of device {rank}: {path}\n" for path in ended.paths)
    assert ended.told.startswith("ArithmeticError('over the top')")
    assert [sorted(log.splitlines(keepends=True)) for log in ended.logs] == (
        [sorted(LINES)] if rank else []
    )


@pytest.mark.processes
def test_no_log_is_kept_that_says_nothing(tmp_path: Path) -> None:
    silent = PROGRAM.replace('print("a line of the script")', "")
    silent = silent.replace('os.write(2, b"a line of a library\\n")', "")
    ended = Ended(tmp_path, 1, "raise PeerLost('a device is lost', device=2)", silent)
    assert (ended.code, ended.errors, ended.folders) == (1, "", 0)


@pytest.mark.processes
@pytest.mark.parametrize(
    ("rank", "lost", "speaks"), [(0, 2, True), (0, -1, True), (1, 0, True), (2, 0, False)]
)
def test_one_device_says_that_another_is_lost(
    tmp_path: Path, rank: int, lost: int, speaks: bool
) -> None:
    ended = Ended(tmp_path, rank, f"raise PeerLost('a device is lost', device={lost})")
    assert ended.code == 1
    places = "".join(f"onefold: output of device {rank}: {path}\n" for path in ended.paths)
    said = "onefold: a device is lost\n" * speaks
    assert ended.errors.replace(LINES[1], "") == said + places
    assert "Traceback" not in ended.errors
    assert ended.told.startswith("PeerLost('a device is lost')")
