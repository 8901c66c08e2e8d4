"""The command behind `make gpu`: no part loses another, and what is found is written at once."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from tests.conftest import ROOT

pytestmark = [pytest.mark.full, pytest.mark.processes]


def make(folder: Path, *choices: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "tests.gpu", "--results", str(folder / "results"), *choices]
    without = {**os.environ, "CUDA_VISIBLE_DEVICES": ""}
    return subprocess.run(
        command, cwd=ROOT, capture_output=True, text=True, timeout=600, env=without
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
    page = (tmp_path / "results" / "gpu.html").read_text()
    assert "tests: timing" in page
    assert "failed" not in page.partition("</style>")[2].replace("passed  failed", "")
    (only,) = found["parts"]
    assert (only["name"], only["ended"]) == ("tests: timing", "well")
    # Some need a GPU, and say so.
    assert {line["outcome"] for line in only["lines"]} - {"skipped"} == {"passed"}
    assert found["machine"]["versions"]["torch"] == torch.__version__
