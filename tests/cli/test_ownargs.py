"""What stands behind a script is the script's own, whatever it is called."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from onefold.cli.main import come_too_late, with_end_of_options
from tests.tables import for_each

OWN = {"-m", "--devices", "--timeout", "--keep"}


@for_each(
    ("given", "taken"),
    [
        ("-m train --devices 2", "-m train -- --devices 2"),
        ("-mtrain -m x", "-mtrain -- -m x"),
        ("--devices 2 -m train x -m y", "--devices 2 -m train -- x -m y"),
        ("-m train -- --devices 2", "-m train -- --devices 2"),
        ("-- train.py -m x", "-- train.py -m x"),
        ("--keep -m -m train -x", "--keep -m -m train -- -x"),
    ],
)
def test_the_commands_own_end_with_the_script(given: str, taken: str) -> None:
    assert with_end_of_options(given.split(), OWN) == taken.split()
    assert come_too_late(["--lr", "1", "--devices=2", "-m"], OWN) == ["--devices", "-m"]
    assert come_too_late(["--device", "2"], OWN) == []


def cli(folder: Path, script: str, *arguments: str) -> tuple[int, str, str]:
    (folder / "train.py").write_text(script)
    command = [sys.executable, "-m", "onefold", *arguments]
    how = {"capture_output": True, "text": True, "check": False, "timeout": 600, "cwd": folder}
    done = subprocess.run(command, **how)  # type: ignore[call-overload]
    return done.returncode, done.stdout, done.stderr


@pytest.mark.processes
def test_a_script_that_refuses_one_of_ours_is_explained(tmp_path: Path) -> None:
    script = "import argparse\nargparse.ArgumentParser().parse_args()\n"
    ours = ["run", "--devices", "cpu:1", "train.py"]
    code, _, errors = cli(tmp_path, script, *ours, "--timeout", "5")
    assert code == 2
    assert "unrecognized arguments: --timeout 5" in errors
    assert "what stands after the script is the script's: give --timeout before it" in errors
    code, _, errors = cli(tmp_path, script, *ours, "--lr", "5")
    assert code == 2
    assert "what stands after" not in errors
