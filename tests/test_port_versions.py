"""The versions of ``examples/ports`` that onefold's lines are counted against do run.

Each prints what the plain loop prints, but for the numbers. A new file there is tested by being
there. With ``-m full`` Accelerate's are run as well, and all with two processes, of
which only the first may print.
"""

from __future__ import annotations

import os
import re
import socket
import subprocess
import sys
from functools import cache
from pathlib import Path

import pytest

from tests.conftest import ROOT
from tests.warm import SCRIPTS

FOLDER = ROOT / "examples" / "ports"
VERSIONS = [
    pytest.param(path, id=f"{way}-{path.stem}", marks=marks)
    for way, marks in (("ddp", ()), ("accelerate", pytest.mark.full))  # loaded for seconds
    for path in sorted((FOLDER / way).glob("*.py"))
]
SHORTEST = {"epochs": 2, "steps": 10}
"""How long the runs are, in what the script counts."""
ON_CPU = {"CUDA_VISIBLE_DEVICES": "", "ACCELERATE_USE_CPU": "true", "MASTER_ADDR": "127.0.0.1"}

pytestmark = [
    pytest.mark.full,
    pytest.mark.processes,
    pytest.mark.parametrize("version", VERSIONS),
]


def free_port() -> str:
    with socket.socket() as found:
        found.bind(("127.0.0.1", 0))
        return str(found.getsockname()[1])


def printed(path: Path, processes: int) -> list[str]:
    """What each of a script's processes prints."""
    (counted,) = re.findall(r"^def main\((\w+)=", path.read_text(), flags=re.MULTILINE)
    words = [str(SCRIPTS / "port_version.py"), str(path), f"{counted}={SHORTEST[counted]}"]
    together = {"WORLD_SIZE": str(processes), "MASTER_PORT": free_port()}
    started = [
        subprocess.Popen(
            [sys.executable, *words],
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            env={**os.environ, **ON_CPU, **together, "RANK": str(rank), "LOCAL_RANK": str(rank)},
        )
        for rank in range(processes)
    ]
    try:
        ended = [process.communicate(timeout=600) for process in started]
    finally:
        for process in started:
            process.kill()
    assert [process.returncode for process in started] == [0] * processes, ended
    return [out for out, _ in ended]


def without_numbers(text: str) -> str:
    return re.sub(r"-?\d[\d.]*(e-?\d+)?", "#", text)


@cache
def of_the_plain_loop(name: str) -> str:
    (text,) = printed(FOLDER / "plain" / name, 1)
    return without_numbers(text)


def check(version: Path, processes: int) -> None:
    if version.parent.name == "accelerate":
        pytest.importorskip("accelerate")
    first, *others = printed(version, processes)
    assert without_numbers(first) == of_the_plain_loop(version.name)
    assert others == [""] * (processes - 1)


def test_a_version_prints_what_the_plain_loop_prints(version: Path) -> None:
    check(version, 1)


@pytest.mark.full
def test_so_it_does_with_two_processes(version: Path) -> None:
    check(version, 2)
