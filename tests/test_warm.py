"""A program that is forked from the test's process finds what one that was started does."""

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from torch.distributed import TCPStore

from tests import warm

SCRIPT = warm.SCRIPTS / "surroundings.py"

pytestmark = pytest.mark.processes


@pytest.fixture
def forks(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """The ids of the processes that are forked from here on."""
    seen: list[int] = []
    fork = os.fork

    def noting() -> int:
        pid = fork()
        seen.append(pid)
        return pid

    monkeypatch.setattr(os, "fork", noting)
    return seen


@pytest.fixture(autouse=True)
def _can_fork() -> None:
    if os.environ.get("PYTHONHASHSEED") != "0" or os.environ.get("ONEFOLD_TESTS_FRESH") == "1":
        pytest.skip("no test forks in this run: without -n, set PYTHONHASHSEED=0")


def surroundings(folder: Path, forked: bool) -> tuple[dict[str, Any], str, int]:
    warm.start_by_fork(not forked)
    done = subprocess.run(
        [sys.executable, str(SCRIPT), "7", "two words"],
        cwd=folder,
        env={**os.environ, "TMPDIR": str(folder), "MINE": "1"},
        start_new_session=True,
        capture_output=True,
        text=True,
        timeout=600,
    )
    return json.loads(done.stdout), done.stderr, done.returncode


def test_a_fork_finds_what_a_start_does(tmp_path: Path, forks: list[int]) -> None:
    forked = surroundings(tmp_path, True)
    assert len(forks) == 1
    started = surroundings(tmp_path, False)
    assert len(forks) == 1
    # With those of a pipe that a library in this process makes anew in each fork.
    assert set(started[0]["descriptors"]) <= set(forked[0]["descriptors"])
    assert len(forked[0].pop("descriptors")) - len(started[0].pop("descriptors")) in (0, 2)
    for name in started[0]:
        assert forked[0][name] == started[0][name], name
    assert forked[1:] == started[1:]


def test_a_pipe_that_a_library_makes_anew_in_each_fork_takes_no_others_place(
    forks: list[int],
) -> None:
    """PyTorch's store does: loader workers then wait at the pipe that has come in their place."""
    warm.start_by_fork(False)
    store = TCPStore("127.0.0.1", 0, 1, True, wait_for_workers=False)
    command = [sys.executable, str(warm.SCRIPTS / "pipes.py")]
    done = subprocess.run(command, capture_output=True, text=True, timeout=600)
    assert (done.stdout, done.stderr, len(forks)) == ("0\n", "", 1)
    del store
