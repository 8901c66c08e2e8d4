"""What the kernel tells of processes."""

from __future__ import annotations

import os
import select
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from onefold.system import process
from onefold.system.process import Stillness, die_with_parent
from tests.tables import for_each

LIMIT_S = 20.0


@pytest.fixture
def sleeper() -> Iterator[subprocess.Popen[bytes]]:
    with subprocess.Popen(["sleep", "60"]) as started:
        yield started
        started.kill()


def until(condition: Callable[[], bool]) -> None:
    limit = time.monotonic() + LIMIT_S
    while not condition():
        assert time.monotonic() < limit, "it did not come to be"
        time.sleep(0.005)


def state_of(pid: int) -> str:
    return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]


# Stopped processes


def test_a_process_that_runs_is_not_still(sleeper: subprocess.Popen[bytes]) -> None:
    seen = Stillness(sleeper.pid)
    assert not any(seen.look() for _ in range(20))
    assert not seen.is_still


def test_a_process_that_stays_stopped_is_told_after_some_looks(
    sleeper: subprocess.Popen[bytes],
) -> None:
    """About four seconds: a debugger may hold a process for a moment."""
    seen = Stillness(sleeper.pid)
    sleeper.send_signal(signal.SIGSTOP)
    until(lambda: state_of(sleeper.pid) == "T")
    assert [seen.look() for _ in range(10)] == [False] * 7 + [True] * 3
    assert 2 <= 8 * process.LOOK_S <= 10


def test_a_process_that_goes_on_is_counted_anew(sleeper: subprocess.Popen[bytes]) -> None:
    seen = Stillness(sleeper.pid)
    for _ in range(2):
        sleeper.send_signal(signal.SIGSTOP)
        until(lambda: state_of(sleeper.pid) == "T")
        assert not any(seen.look() for _ in range(7))
        assert seen.is_still
        sleeper.send_signal(signal.SIGCONT)
        until(lambda: state_of(sleeper.pid) != "T")
        assert not seen.look()
        assert not seen.is_still


def test_a_process_that_has_ended_is_not_still() -> None:
    with subprocess.Popen(["true"]) as gone:
        gone.wait()
    seen = Stillness(gone.pid)
    assert not any(seen.look() for _ in range(10))


@for_each("name", ["a) T b", "T (t"])
def test_the_name_of_a_process_is_not_its_state(name: str, tmp_path: Path) -> None:
    """The kernel puts it before the state, with whatever it holds."""
    script = tmp_path / name
    script.write_text("#!/bin/sh\nread line\n")
    script.chmod(0o700)
    with subprocess.Popen([script], stdin=subprocess.PIPE) as started:
        until(lambda: name in Path(f"/proc/{started.pid}/stat").read_text())
        assert not process._is_stopped(started.pid)


# Children that end with their parent

PARENT = """
import os, sys, time
from onefold.system.process import die_with_parent
if os.fork():
    time.sleep(60)
    sys.exit()
die_with_parent(os.getppid())
os.write(1, f"{os.getpid()}\\n".encode())
time.sleep(60)
"""


@pytest.mark.processes
def test_a_child_ends_with_its_parent_whatever_ends_that() -> None:
    with subprocess.Popen([sys.executable, "-c", PARENT], stdout=subprocess.PIPE) as parent:
        assert parent.stdout is not None
        child = int(parent.stdout.readline())
        end = os.pidfd_open(child)
        parent.kill()
        ready, _, _ = select.select([end], [], [], LIMIT_S)
        os.close(end)
    assert ready, "the child lives on"


def test_a_child_whose_parent_is_gone_already_ends_at_once() -> None:
    pid = os.fork()
    if pid == 0:
        die_with_parent(os.getpid())  # which nobody is the child of
        os._exit(0)
    assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 1
