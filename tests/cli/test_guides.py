"""The guides to a recorded run: each command runs, and prints what stands there."""

import os
import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = pytest.mark.full

ROOT = Path(__file__).resolve().parents[2]
BLOCK = re.compile(r"^```(\w+)\n(.*?)^```$", re.M | re.S)
FLOAT = re.compile(r"-?\d+\.\d+(e[+-]\d+)?")


def masked(text: str) -> str:
    """Without numbers that another kind of processor rounds otherwise, and without line breaks."""
    return " ".join(FLOAT.sub("#", text).split())


def test_every_command_prints_what_stands_there(tmp_path: Path) -> None:
    examples = tmp_path / "examples"
    examples.mkdir()
    (examples / "loss_jump.py").write_text((ROOT / "examples/loss_jump.py").read_text())
    wide = {**os.environ, "COLUMNS": "200"}
    printed, ran = "", 0
    for page in ("loss-jump.md", "repeat-a-step.md"):
        for kind, text in BLOCK.findall((ROOT / "docs/guides" / page).read_text()):
            if kind == "python":
                name = text.partition("\n")[0].removeprefix("# ")
                (tmp_path / name).write_text(text)
            elif kind == "text":
                for line in text.splitlines():
                    assert masked(line) in masked(printed), printed
            for line in text.splitlines() if kind == "sh" and "--git" not in text else ():
                command = [sys.executable, "-m", *shlex.split(line)]
                done = subprocess.run(
                    command, cwd=tmp_path, capture_output=True, text=True, check=False, env=wide
                )
                printed = done.stdout + done.stderr
                assert done.returncode == 0, printed
                ran += 1
    assert ran == 9
