"""``onefold run --checkpoint`` with schedules of all kinds, and with batches used twice."""

from __future__ import annotations

import os
import subprocess
import sys
from functools import cache
from pathlib import Path

import pytest

from tests.checkpoint.folders import steps_in
from tests.conftest import ROOT

SCRIPT = ROOT / "tests" / "scripts" / "scheduled.py"
KINDS = ("epoch", "plateau", "batches", "early", "twice")
pytestmark = [
    pytest.mark.processes,
    pytest.mark.xdist_group("faults"),
]


def run(folder: Path, devices: int, kind: str, last: int, *options: str) -> tuple[int, list[str]]:
    """Exit code, and the lines that the script printed."""
    command = ["run", "--devices", f"cpu:{devices}", *options, str(SCRIPT), kind, str(last)]
    done = subprocess.run(
        [sys.executable, "-m", "onefold", *command],
        capture_output=True,
        text=True,
        timeout=600,
        check=False,
        env={**os.environ, "TMPDIR": str(folder)},
    )
    assert done.returncode in (0, 75), done.stderr
    return done.returncode, done.stdout.splitlines()


@cache
def whole(kind: str) -> list[str]:
    """What a run prints that nobody stops."""
    code, lines = run(Path("/tmp"), 1, kind, 0)
    assert code == 0
    return lines


@pytest.mark.full
@pytest.mark.parametrize("kind", KINDS)
def test_it_goes_on_as_if_it_had_never_been_stopped(tmp_path: Path, kind: str) -> None:
    """Stopped again and again: within epochs, in their last steps, and in the first of a run."""
    options = ("--checkpoint", str(tmp_path / "run"), "--every", "2")
    seen: list[str] = []
    for devices, last in ((2, 1), (3, 2), (1, 3), (2, 1), (3, 0)):
        code, lines = run(tmp_path, devices, kind, last, *options)
        seen += lines
        if code == 0:
            break
    assert code == 0
    # The step in which a stop is agreed on prints nothing, where it is saved at once.
    assert seen[-1] == whole(kind)[-1]
    assert set(seen) <= set(whole(kind))
    assert len(set(seen)) == len(seen), "a step was made twice"


@pytest.mark.full
@pytest.mark.parametrize(("every", "steps"), [(4, [5, 9, 12]), (5, [5, 10, 12])])
def test_batches_that_are_only_sometimes_used_twice(
    tmp_path: Path, every: int, steps: list[int]
) -> None:
    """Steps 4 and 5, 6 and 7, 8 and 9 are those of one batch each: none is saved between them."""
    options = ("--checkpoint", str(tmp_path / "run"), "--every", str(every), "--keep-last", "20")
    code, lines = run(tmp_path, 2, "odd", 0, *options)
    assert code == 0
    assert lines == whole("odd")
    assert steps_in(tmp_path / "run") == steps
