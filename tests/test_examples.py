"""The examples and the README's script, run as a reader would."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from tests.conftest import ROOT
from tests.test_docs import blocks

EXAMPLES = ROOT / "examples"
pytestmark = [pytest.mark.full, pytest.mark.processes, pytest.mark.fresh]


def run(*command: str, cwd: Path) -> str:
    """Standard output of a command that must succeed."""
    environment = {**os.environ, "PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}"}
    done = subprocess.run(
        command, capture_output=True, text=True, check=False, timeout=600, cwd=cwd, env=environment
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


def accuracies(text: str) -> list[float]:
    return [float(each) for each in re.findall(r"test accuracy ([\d.]+)%", text)]


def test_mnist_reaches_97_percent_and_is_verified(shared_data: Path, tmp_path: Path) -> None:
    script = [
        str(EXAMPLES / "from_ddp/with_onefold.py"),
        "--data",
        str(shared_data / "mnist-small"),
    ]
    checkpointed = ["--checkpoint", "run", "--save-every", "100", *script]
    told = run("onefold", "run", "--devices", "2", *checkpointed, cwd=tmp_path)
    assert len(accuracies(told)) == 5
    assert max(accuracies(told)) >= 97
    (tmp_path / "lenet.pt").rename(tmp_path / "first.pt")
    run("onefold", "run", "--devices", "1", *checkpointed, cwd=tmp_path)
    first, again = (torch.load(tmp_path / name) for name in ("first.pt", "lenet.pt"))
    assert all(torch.equal(first[name], again[name]) for name in first), "all is done"
    command = ["onefold", "verify", "--devices", "1,2,3", "--steps", "3", *script]
    assert "The bits agree after each of 3 steps." in run(*command, cwd=tmp_path)


def test_ddp_and_onefold_learn_the_same_task(shared_data: Path, tmp_path: Path) -> None:
    given = ["--data", str(shared_data / "mnist-small"), "--epochs", "1"]
    for name in ("ddp.py", "with_onefold.py"):
        script = str(EXAMPLES / "from_ddp" / name)
        command = ["torchrun", "--standalone", "--nproc-per-node", "2", script, *given]
        (accuracy,) = accuracies(run(*command, cwd=tmp_path))
        assert accuracy > 85


def test_the_script_of_the_readme_runs_alike_everywhere(tmp_path: Path) -> None:
    (script,) = blocks(ROOT / "README.md")
    (tmp_path / "train.py").write_text(script)
    alone = run(sys.executable, "train.py", cwd=tmp_path)
    launched = run("onefold", "run", "--devices", "2", "train.py", cwd=tmp_path)
    torchrun = ["torchrun", "--standalone", "--nproc-per-node", "3", "train.py"]
    assert alone == launched == run(*torchrun, cwd=tmp_path)
    assert len(alone.splitlines()) == 5


def test_the_picture_of_the_promise(tmp_path: Path) -> None:
    picture = tmp_path / "promise.svg"
    command = ["-m", "docs.draw_promise", "--output", str(picture)]
    ours, theirs, named = run(sys.executable, *command, cwd=ROOT).splitlines()
    assert [len(set(line.split()[1:])) for line in (ours, theirs)] == [1, 3]
    assert named == str(picture)
    assert "</svg>" in picture.read_text()
