"""The command behind `make gpu`: no part loses another, and what is found is written at once."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch

from tests.conftest import ROOT
from tests.gpu.parts import Part, run_part
from tests.small import lives
from tests.tables import for_each

pytestmark = [pytest.mark.full, pytest.mark.processes]

HANGS = """
import os, subprocess, sys, time
child = subprocess.Popen([sys.executable, "-S", "-c", "import time; time.sleep(600)"])
with open(os.environ["ONEFOLD_GPU_LINES"], "a") as file:
    file.write(f'{{"child": {child.pid}}}\\n{{"te')
time.sleep(600)
"""


@for_each(
    ("code", "limit_s", "ended", "tail"),
    [
        ("raise ValueError('this one')", 30, "with exit code 1", "ValueError: this one"),
        (HANGS, 5, "cut off after 5 s", ""),
    ],
)
def test_how_a_part_ends(code: str, limit_s: float, ended: str, tail: str, tmp_path: Path) -> None:
    part = Part(name="a part", command=["-c", code], limit_s=limit_s)
    result = run_part(part, dict(os.environ), tmp_path, limit_s)
    assert (result.ended, len(result.lines)) == (ended, int(code == HANGS))
    assert tail in result.tail
    # All that it has started is ended with it.
    for line in result.lines:
        deadline = time.monotonic() + 5
        while time.monotonic() < deadline and lives(line["child"]):
            time.sleep(0.02)
        assert not lives(line["child"])


def make(folder: Path, *choices: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "tests.gpu", "--results", str(folder / "results"), *choices]
    without = {**os.environ, "CUDA_VISIBLE_DEVICES": ""}
    return subprocess.run(
        command, cwd=ROOT, capture_output=True, text=True, timeout=600, env=without, check=False
    )


def test_the_whole_way_on_the_processor(tmp_path: Path) -> None:
    done = make(tmp_path)
    assert done.returncode == 2
    assert "there is no GPU that PyTorch sees" in done.stderr
    assert not (tmp_path / "results").exists()
    done = make(tmp_path, "--device", "cpu", "--parts", "timing")
    assert done.returncode == 0, done.stdout + done.stderr
    found = json.loads((tmp_path / "results" / "gpu.json").read_text())
    assert (tmp_path / "results" / "gpu.txt").read_text() in done.stdout
    (only,) = found["parts"]
    assert (only["name"], only["ended"]) == ("tests: timing", "well")
    assert {line["outcome"] for line in only["lines"]} == {"passed"}
    assert found["machine"]["versions"]["torch"] == torch.__version__
