"""Another user of the host tries all the while to get into a run, and to hold it up."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

import onefold
from tests.somebody import needs_root

SCRIPTS = Path(__file__).parent / "scripts"
TRAIN = Path(__file__).parent / "soak" / "train.py"
SOURCE = Path(onefold.__file__).parent.parent
LIMIT_S = 170
needs_ip = pytest.mark.skipif(shutil.which("ip") is None, reason="needs ip, of iproute2")


def run(folder: Path, *words: str) -> str:
    environment = {**os.environ, "PYTHONPATH": str(SOURCE), "SOAK_BEGUN": str(folder / "begun")}
    return subprocess.run(
        [sys.executable, *words],
        stdout=subprocess.PIPE,
        text=True,
        check=True,
        timeout=LIMIT_S * 3 if "code" in words else LIMIT_S,
        cwd=folder,
        env=environment,
    ).stdout


@needs_root
@needs_ip
@pytest.mark.processes
@pytest.mark.parametrize(
    ("attack", "exchange"),
    [("everything", "shared"), ("everything", "collective"), ("places", "shared")],
)
def test_another_user_gets_nothing_and_holds_nothing_up(
    tmp_path: Path, attack: str, exchange: str
) -> None:
    said = run(tmp_path, str(SCRIPTS / "attacked.py"), attack, exchange, str(tmp_path))
    rounds, got, code, output, errors = json.loads(said)
    assert got == []
    assert rounds > 5
    assert (code, output) == (0, run(tmp_path, str(TRAIN))), errors


@needs_root
@pytest.mark.processes
@pytest.mark.full
@pytest.mark.timeout(600)
@pytest.mark.parametrize("launcher", ["python", "onefold", "torchrun"])
def test_no_compiled_code_lies_where_another_user_can_change_it(
    tmp_path: Path, launcher: str
) -> None:
    home = tmp_path / "home"
    home.mkdir(mode=0o700)
    said = run(tmp_path, str(SCRIPTS / "attacked.py"), "code", launcher, str(home))
    rounds, got, code, output, errors = json.loads(said)
    assert got == []
    assert rounds > 5
    assert code == 0, errors
    assert len(output.split()[-1]) == 16
    (kept,) = (home / ".cache" / "onefold" / "compiled").iterdir()
    assert list(kept.rglob("*.so"))
