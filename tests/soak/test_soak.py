"""One course; ``python -m tests.soak`` runs as many others as asked for."""

import subprocess
import sys
from pathlib import Path

import pytest

from tests.soak.course import draw
from tests.soak.faults import FAULTS

pytestmark = pytest.mark.full


def test_every_fault_comes_about() -> None:
    drawn = {draw(seed).fault for seed in range(len(FAULTS))}
    assert drawn == {name for name, fault in FAULTS.items() if not fault.needs_mounts}


@pytest.mark.processes
@pytest.mark.xdist_group("faults")
def test_a_run_that_is_killed_while_it_saves_itself_ends_as_it_must() -> None:
    options = ["--runs", str(len(FAULTS)), "--fault", "TERM and a worker KILL"]
    done = subprocess.run(
        [sys.executable, "-m", "tests.soak", *options],
        capture_output=True,
        text=True,
        check=False,
        timeout=600,
        cwd=Path(__file__).parents[2],
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert "1 courses, 0 wrong" in done.stdout
