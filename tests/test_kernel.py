"""The kernel: what a plain run imports, which trains without everything else."""

import json
import os
import subprocess
import sys
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import pytest

import onefold
from onefold.core.late import LATE
from tests.launcher.test_other_launchers import free_port
from tests.scripts import kernel
from tests.test_rooms import code_lines
from tests.warm import SCRIPTS

SOURCE = Path(onefold.__file__).parent
# Lines of code that are imported. Lower these limits when the kernel shrinks; never raise them.
LIMIT_ALONE = 13_300
LIMIT_TWO_PROCESSES = 15_000
"""Without hang reports."""


def started(**variables: str) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [sys.executable, str(SCRIPTS / "kernel.py")],
        env={**os.environ, "PYTHONHASHSEED": "0", **variables},
        stdout=subprocess.PIPE,
        text=True,
    )


def found_by(process: subprocess.Popen[str]) -> Any:
    output, _ = process.communicate(timeout=300)
    assert process.returncode == 0
    return json.loads(output.splitlines()[-1])


def lines_of(files: Iterable[str]) -> int:
    return sum(code_lines(Path(file)) for file in files)


@pytest.fixture(scope="module")
def alone() -> Any:
    return found_by(started())


@pytest.mark.processes
def test_a_plain_run_trains_without_all_other_rooms(alone: Any) -> None:
    """On 1, 2 and 3 devices of one process, to one fingerprint."""
    assert sorted(alone["fingerprints"]) == ["1", "2", "3"]
    assert len(set(alone["fingerprints"].values())) == 1
    for modules in alone["modules"].values():
        assert lines_of(modules.values()) <= LIMIT_ALONE


@pytest.mark.processes
def test_two_processes_train_without_them_too(alone: Any) -> None:
    """Under PyTorch's protocol, so that no launcher of onefold takes part."""
    size = {"WORLD_SIZE": "2", "LOCAL_WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1"}
    size["MASTER_PORT"] = str(free_port())
    processes = [started(RANK=str(n), LOCAL_RANK=str(n), **size) for n in range(2)]
    with processes[1].stdout:  # type: ignore[union-attr]  # the output of others goes to a log
        lead = found_by(processes[0])
    assert processes[1].wait(timeout=300) == 0
    assert lead["fingerprints"]["2"] == alone["fingerprints"]["1"]
    modules = lead["modules"]["2"]
    hangs = {f"onefold.{name}" for name in kernel.FOR_HANGS}
    others = [file for name, file in modules.items() if name not in hangs]
    assert lines_of(others) <= LIMIT_TWO_PROCESSES


def test_what_is_refused_is_there() -> None:
    names = (*kernel.REFUSED, *kernel.NEEDED, *kernel.WITH_OTHERS, *kernel.FOR_HANGS, *LATE)
    places = [SOURCE.joinpath(*name.split(".")) for name in names]
    assert [p for p in places if not p.is_dir() and not p.with_suffix(".py").is_file()] == []
