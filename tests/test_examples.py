"""The examples and the README's script, run as a reader would."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from tests.conftest import ROOT

EXAMPLES = ROOT / "examples"
pytestmark = [pytest.mark.full, pytest.mark.processes, pytest.mark.fresh]


def run(*command: str, cwd: Path) -> str:
    """Standard output of a command that must succeed."""
    path = f"{Path(sys.executable).parent}:{os.environ['PATH']}"
    done = subprocess.run(
        command,
        capture_output=True,
        text=True,
        check=False,
        timeout=600,
        cwd=cwd,
        env={**os.environ, "PATH": path},
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_mnist_reaches_97_percent_on_two_devices(shared_data: Path, tmp_path: Path) -> None:
    script, data = str(EXAMPLES / "mnist.py"), str(shared_data / "mnist-small")
    checkpointed = ["--checkpoint", "run", "--every", "100", script, "--data", data]
    told = run("onefold", "run", "--devices", "2", *checkpointed, cwd=tmp_path)
    accuracies = [float(text) for text in re.findall(r"test accuracy ([\d.]+)%", told)]
    assert len(accuracies) == 5
    assert max(accuracies) >= 97
    again = run("onefold", "run", "--devices", "1", *checkpointed, cwd=tmp_path)
    assert again == told.splitlines(keepends=True)[-1], "all is done, and the model is the same"


def test_mnist_is_verified(shared_data: Path, tmp_path: Path) -> None:
    script, data = str(EXAMPLES / "mnist.py"), str(shared_data / "mnist-small")
    command = ["onefold", "verify", "--devices", "1,2,3", "--steps", "3", script, "--data", data]
    assert "The bits agree after each of 3 steps." in run(*command, cwd=tmp_path)


def test_ddp_and_onefold_learn_the_same_task(shared_data: Path, tmp_path: Path) -> None:
    data = str(shared_data / "mnist-small")
    for name in ("ddp.py", "with_onefold.py"):
        script = str(EXAMPLES / "from_ddp" / name)
        command = ["torchrun", "--standalone", "--nproc-per-node", "2", script]
        told = run(*command, "--data", data, "--epochs", "1", cwd=tmp_path)
        (accuracy,) = re.findall(r"test accuracy ([\d.]+)%", told)
        assert float(accuracy) > 85


def test_the_script_of_the_readme_runs_alike_everywhere(tmp_path: Path) -> None:
    readme = (ROOT / "README.md").read_text()
    (script,) = re.findall(r"```python\n(.*?)```", readme, flags=re.DOTALL)
    (tmp_path / "train.py").write_text(script)
    alone = run(sys.executable, "train.py", cwd=tmp_path)
    launched = run("onefold", "run", "--devices", "2", "train.py", cwd=tmp_path)
    torchrun = ["torchrun", "--standalone", "--nproc-per-node", "3", "train.py"]
    assert alone == launched == run(*torchrun, cwd=tmp_path)
    assert len(alone.splitlines()) == 5
