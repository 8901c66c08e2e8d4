"""What the documents show is run as it stands there."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from pathlib import Path

import pytest

from tests.checkpoint.folders import steps_in
from tests.conftest import ROOT

pytestmark = [pytest.mark.processes, pytest.mark.fresh]

NO_ONEFOLD_AND_NO_GPU = """
import sys
sys.modules["onefold"] = None
import torch
assert not torch.cuda.is_available()
"""


def blocks(path: Path) -> list[str]:
    return re.findall(r"```python\n(.*?)```", path.read_text(), flags=re.DOTALL)


@pytest.mark.full
def test_a_checkpoint_of_two_devices_is_read_by_plain_pytorch(tmp_path: Path) -> None:
    """The README's script, saved without a line changed, and ten lines of the documents."""
    (script,) = blocks(ROOT / "README.md")
    (reading,) = (b for b in blocks(ROOT / "docs/checkpoints.md") if "load_state_dict" in b)
    (tmp_path / "train.py").write_text(script)
    options = ["--devices", "cpu:2", "--checkpoint", "run", "--every", "20", "--keep-last", "9"]
    command = [sys.executable, "-m", "onefold", "run", *options, "train.py"]
    subprocess.run(command, cwd=tmp_path, check=True, timeout=600, capture_output=True)
    assert steps_in(tmp_path / "run") == [20, 40, 60, 80, 100]
    done = subprocess.run(
        [sys.executable, "-c", NO_ONEFOLD_AND_NO_GPU + reading],
        cwd=tmp_path,
        check=False,
        timeout=600,
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr
    run = json.loads((tmp_path / "run/step-00000020/run.json").read_text())
    parameters = 20 * 64 + 64 + 64 * 2 + 2
    assert done.stdout == f"{run['fingerprint']} {parameters} {4 * 3}\n"


def test_a_program_that_launches_runs_as_it_stands_there(tmp_path: Path) -> None:
    script = next(b for b in blocks(ROOT / "docs/running.md") if "__main__" in b)
    (tmp_path / "program.py").write_text(script)
    done = subprocess.run(
        [sys.executable, "program.py"],
        cwd=tmp_path,
        check=False,
        timeout=600,
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr
    assert 0 <= float(done.stdout) < 10


@pytest.mark.full
def test_the_guide_to_samplers_and_streams_runs(tmp_path: Path) -> None:
    """All of it as one script, on two devices."""
    script = "\n".join(blocks(ROOT / "docs/guides/samplers-and-streams.md"))
    (tmp_path / "train.py").write_text(script)
    command = [sys.executable, "-m", "onefold", "run", "--devices", "cpu:2", "train.py"]
    done = subprocess.run(
        command, cwd=tmp_path, check=False, timeout=600, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout == "12 ['loss']\n8 True\n16 12\n26 16\n"
