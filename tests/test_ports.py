"""Each script of ``examples/ports``: one result on any number of devices, the one that was meant.

A new file there is tested by being there. Its ``main`` takes ``epochs`` or ``steps`` and returns
the trainer's fingerprint. All are run with ``onefold run --checkpoint``, and stopped by a signal.
One that takes ``checkpoint`` also saves and resumes itself, and is tested by a crash.
"""

import inspect
import os
import re
import runpy
import subprocess
import sys
from pathlib import Path

import pytest

from tests.conftest import ROOT
from tests.warm import SCRIPTS

FOLDER = ROOT / "examples" / "ports"
PORTS = sorted(path for path in FOLDER.glob("*.py") if path.name != "count_lines.py")
SHORT = {"epochs": 2, "steps": 24}
"""How long the runs are, in what the script counts."""
MEANT = (
    "The mathematics agree: 4 shards and one give the same",
    "Not compared: hidden, cell has the rule 'per_shard'",  # which no whole batch can have
    "Not compared: 3 of 3 steps, whose batches have parts",  # of another length, or shared
)
"""What verify may say of the mathematics."""

WAYS = [
    (port, own)
    for port in PORTS
    for own in (False, True)
    if not own or "checkpoint=None" in port.read_text()
]
"""Each script with ``onefold run --checkpoint``; and as it saves itself, if it does."""
REFUSED = {
    "lbfgs": "the state of the script's own optimizer would be lost",
    "sam": "the state of the script's own optimizer would be lost",
    "reinforce": "the script calls the model itself during replay, after step",
    "replay": "the script calls the model itself during replay, after step",
}
"""What no record knows; with ``onefold run --checkpoint``."""

pytestmark = [pytest.mark.full, pytest.mark.processes]
each_port = pytest.mark.parametrize("port", PORTS, ids=lambda path: path.stem)
Done = subprocess.CompletedProcess[str]


def onefold(folder: Path, command: str, devices: str, *words: str) -> Done:
    """Run a command of onefold to its end, in a folder of its own."""
    return subprocess.run(
        [sys.executable, "-m", "onefold", command, "--devices", devices, *words],
        capture_output=True,
        text=True,
        check=False,
        timeout=600,
        cwd=folder,
        env={**os.environ, "COLUMNS": "300"},
    )


def end_of(run: Done) -> tuple[int, str]:
    """The number of the last step of a run that came to its end, and its fingerprint."""
    assert run.returncode == 0, run.stdout + run.stderr
    found = re.search(r"ended after step (\d+) with ([0-9a-f]{16})\n$", run.stdout)
    assert found, run.stdout
    return int(found[1]), found[2]


@pytest.mark.parametrize(
    ("port", "own"), WAYS, ids=[f"{port.stem}-{'own' if own else 'run'}" for port, own in WAYS]
)
def test_a_run_that_is_stopped_ends_as_one_that_is_not(
    port: Path, *, own: bool, tmp_path: Path
) -> None:
    parameters = inspect.signature(runpy.run_path(str(port))["main"]).parameters
    (counted,) = SHORT.keys() & parameters.keys()
    options = [] if own else ["--checkpoint", "saved", "--save-every", "1000"]
    choices = [f"{counted}={SHORT[counted]}", *["checkpoint=saved"] * own]

    def run(devices: int, how: str = "never", stop: int = 0) -> Done:
        script = [str(SCRIPTS / "port.py"), str(port), how, str(stop)]
        return onefold(tmp_path, "run", f"cpu:{devices}", *options, *script, *choices)

    script = [str(SCRIPTS / "port.py"), str(port), "never", "0", choices[0]]
    alone = onefold(tmp_path, "run", "cpu:1", *script)
    stopped = run(3, "crash" if own else "signal", end_of(alone)[0] * 5 // 8)
    refused = "" if own else REFUSED.get(port.stem, "")
    if refused and stopped.returncode == 1:  # before its first step
        assert refused in stopped.stderr
        return
    assert stopped.returncode == (1 if own else 75), stopped.stderr
    assert re.search(r"the crash that was asked for|stopped by SIGTERM", stopped.stderr)
    assert list(tmp_path.glob("saved/step-*"))
    resumed = run(2)
    if refused:
        assert resumed.returncode == 1
        assert refused in resumed.stderr
        return
    assert end_of(resumed) == end_of(alone)
    if own:
        # It has not begun anew: what was printed before the checkpoint is not printed again.
        assert len(resumed.stdout.splitlines()) < len(alone.stdout.splitlines())
    else:
        assert stopped.stdout + resumed.stdout == alone.stdout


@each_port
def test_one_result_on_any_number_of_devices_and_the_one_that_was_meant(
    port: Path, tmp_path: Path
) -> None:
    done = onefold(tmp_path, "verify", "1,2,3", "--steps", "3", str(port))
    said = " ".join(done.stdout.split())
    assert done.returncode == 0, done.stdout + done.stderr
    assert "The bits agree after each of 3 steps." in said
    assert any(words in said for words in MEANT)
