"""What the kernel says of processes, children that end with their parent, and Ctrl-C."""

import os
import select
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest
import torch

from onefold.system.accelerator import capacity_bytes
from onefold.system.process import (
    LOOK_S,
    StoppedProcess,
    ctrl_c_as_before,
    ctrl_c_later,
    die_with_parent,
)
from tests.tables import for_each

LIMIT_S = 20.0


def until(condition: Callable[[], bool]) -> None:
    limit = time.monotonic() + LIMIT_S
    while not condition():
        assert time.monotonic() < limit, "it did not come to be"
        time.sleep(0.005)


def state_of(pid: int) -> str:
    return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]


def test_a_process_that_stays_stopped_is_noticed_after_some_looks() -> None:
    """After about four seconds: a debugger may hold a process for a moment."""
    with subprocess.Popen(["sleep", "60"]) as process:
        seen = StoppedProcess(process.pid)
        assert not any(seen.sample_state() for _ in range(20))
        for _ in range(2):
            process.send_signal(signal.SIGSTOP)
            until(lambda: state_of(process.pid) == "T")
            assert not any(seen.sample_state() for _ in range(7))
            assert seen.is_still
            process.send_signal(signal.SIGCONT)
            until(lambda: state_of(process.pid) != "T")
            assert not seen.sample_state()
            assert not seen.is_still
        process.send_signal(signal.SIGSTOP)
        until(lambda: state_of(process.pid) == "T")
        assert [seen.sample_state() for _ in range(10)] == [False] * 7 + [True] * 3
        assert 2 <= 8 * LOOK_S <= 10
        process.kill()
    assert not any(StoppedProcess(process.pid).sample_state() for _ in range(10))


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
    pid = os.fork()
    if pid == 0:
        die_with_parent(os.getpid())  # which nobody is the child of: it is gone already
        os._exit(0)
    assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 1


@pytest.fixture
def _ctrl_c() -> Iterator[None]:
    """Ctrl-C raises, as it does in a program that is started by hand, and is given back."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler
    signal.signal(signal.SIGINT, before)


@pytest.mark.usefixtures("_ctrl_c")
def test_ctrl_c_comes_when_the_block_is_left() -> None:
    end = "the end of the block"
    for defer, error, expected in (
        (0, None, ["Ctrl-C, after None"]),
        (1, None, [end, "Ctrl-C, after None"]),
        (2, ValueError("an error"), [end, "Ctrl-C, after an error"]),
    ):
        reached: list[str] = []
        try:
            with ExitStack() as blocks:
                for _ in range(defer):
                    blocks.enter_context(ctrl_c_later())
                signal.raise_signal(signal.SIGINT)
                reached.append(end)
                if error is not None:
                    raise error
        except KeyboardInterrupt as interrupt:
            reached.append(f"Ctrl-C, after {interrupt.__context__}")
        assert reached == expected


@pytest.mark.usefixtures("_ctrl_c")
def test_handlers_of_the_program_stay_its_own() -> None:
    called: list[Any] = []
    signal.signal(signal.SIGINT, handler := lambda number, _: called.append(number))
    with ctrl_c_later():
        signal.raise_signal(signal.SIGINT)
        assert called == []
    assert called == [signal.SIGINT]
    with ctrl_c_later(), ctrl_c_later():
        signal.raise_signal(signal.SIGINT)
        signal.raise_signal(signal.SIGINT)  # somebody does not want to wait
        assert called == [signal.SIGINT] * 3
    assert called == [signal.SIGINT] * 3
    called.clear()
    called.append(signal.SIGINT)
    assert signal.signal(signal.SIGINT, signal.SIG_IGN) is handler
    with ctrl_c_later():
        assert signal.getsignal(signal.SIGINT) == signal.SIG_IGN
    assert signal.signal(signal.SIGINT, signal.default_int_handler) == signal.SIG_IGN

    def look() -> None:
        with ctrl_c_later():  # in another thread it puts nothing off
            called.append(signal.getsignal(signal.SIGINT))

    thread = threading.Thread(target=look)
    thread.start()
    thread.join()
    assert called[1:] == [signal.default_int_handler]
    with ctrl_c_later(), ctrl_c_later():
        pid = os.fork()
        if pid == 0:
            ctrl_c_as_before()
            os._exit(3 if signal.getsignal(signal.SIGINT) is signal.default_int_handler else 4)
    assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 3


# How much memory a device has


CPU = torch.device("cpu")
GROUP, MEMORY = "/proc/self/cgroup", "/sys/fs/cgroup"
NESTED = {
    GROUP: "12:cpu:/x\n0::/a/b\n",
    f"{MEMORY}/a/b/memory.max": "7000\n",
    f"{MEMORY}/memory.max": "9000\n",
}


@for_each(
    ("files", "expected"),
    [
        ({}, None),
        ({GROUP: "4:pids:/x\n", f"{MEMORY}/memory.max": "6000\n"}, None),
        ({GROUP: "0::/a/b\n", f"{MEMORY}/a/memory.max": "5000\n"}, 5000),
        ({**NESTED, f"{MEMORY}/a/memory.max": "max\n"}, 7000),
        (
            {
                GROUP: "4:cpu,memory:/x/y\n3:pids:/\n",
                f"{MEMORY}/memory/x/memory.limit_in_bytes": "6000\n",
                f"{MEMORY}/memory/memory.limit_in_bytes": "9223372036854771712\n",
            },
            6000,
        ),
    ],
)
def test_limits_of_control_groups_count(
    files: dict[str, str], expected: int | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    def read(path: Path) -> str:
        if str(path) in files:
            return files[str(path)]
        raise FileNotFoundError(path)

    with monkeypatch.context() as patch:
        patch.setattr(Path, "read_text", read)
        found = capacity_bytes(CPU)
    assert found == (expected or os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES"))
