"""``onefold run --checkpoint`` of scripts that update by themselves, with `trainer.gradient`."""

from __future__ import annotations

import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from tests.checkpoint.folders import steps_in

SCRIPT = Path(__file__).parent.parent / "scripts" / "by_script.py"
pytestmark = [
    pytest.mark.processes,
    pytest.mark.xdist_group("faults"),
]


def start(folder: Path, devices: int, *words: str) -> subprocess.Popen[str]:
    command = [sys.executable, "-m", "onefold", "run", "--devices", f"cpu:{devices}"]
    options = [word for word in words if word.startswith("--")]
    arguments = [word for word in words if not word.startswith("--")]
    return subprocess.Popen(
        [*command, *options, str(SCRIPT), *arguments],
        cwd=folder,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


def finish(process: subprocess.Popen[str]) -> tuple[int, str, str]:
    output, errors = process.communicate(timeout=600)
    return process.returncode, (output.splitlines() or [""])[-1], errors


@pytest.mark.full
@pytest.mark.parametrize(
    ("kind", "exchange"), [("inside", "shared"), ("inside", "collective"), ("outside", "shared")]
)
def test_a_stopped_run_goes_on_with_the_same_bits(kind: str, exchange: str, tmp_path: Path) -> None:
    """It is saved after the script's update, before the next step."""
    whole = finish(start(tmp_path, 1, kind, "0", "23"))
    assert whole[0] == 0
    options = ("--checkpoint=run", "--every=4", f"--exchange={exchange}", "--keep-last=9")
    first = start(tmp_path, 2, *options, kind, "0.05", "23")
    deadline = time.monotonic() + 60
    while not (tmp_path / "run" / "step-00000004").exists():
        assert first.poll() is None
        assert time.monotonic() < deadline
        time.sleep(0.02)
    first.send_signal(signal.SIGTERM)
    code, _, errors = finish(first)
    assert code == 75, errors
    assert f"saved in {tmp_path / 'run'}" in errors
    steps = steps_in(tmp_path / "run")
    assert 4 < steps[-1] < 23
    code, fingerprint, errors = finish(start(tmp_path, 3, *options, kind, "0", "23"))
    assert (code, fingerprint) == (0, whole[1]), errors
    assert f"going on after step {steps[-1]}" in errors
    assert {8, 12, 16, 20, 23} <= set(steps_in(tmp_path / "run"))


def test_without_an_optimizer_it_is_refused(tmp_path: Path) -> None:
    code, _, errors = finish(start(tmp_path, 2, "--checkpoint=run", "none", "0", "3"))
    assert code == 1
    assert "what the script's own keeps would be lost. Call trainer.save" in errors
    assert finish(start(tmp_path, 2, "none", "0", "3"))[0] == 0
