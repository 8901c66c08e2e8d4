"""What stands behind a script is the script's own, whatever it is called."""

import subprocess
import sys
from pathlib import Path

import pytest

from onefold.cli.main import come_too_late, with_end_of_options
from tests.tables import for_each

OWN = {"-m", "--devices", "--timeout", "--placement"}


@for_each(
    ("given", "taken"),
    [
        ("-m train --devices 2", "-m train -- --devices 2"),
        ("-mtrain -m x", "-mtrain -- -m x"),
        ("--devices 2 -m train x -m y", "--devices 2 -m train -- x -m y"),
        ("-m train -- --devices 2", "-m train -- --devices 2"),
        ("-- train.py -m x", "-- train.py -m x"),
        ("--placement -m -m train -x", "--placement -m -m train -- -x"),
    ],
)
def test_the_commands_own_end_with_the_script(given: str, taken: str) -> None:
    assert with_end_of_options(given.split(), OWN) == taken.split()
    assert come_too_late(["--lr", "1", "--devices=2", "-m"], OWN) == ["--devices", "-m"]
    assert come_too_late(["--device", "2"], OWN) == []


@pytest.mark.processes
@for_each(("option", "explained"), [("--timeout", True), ("--lr", False)])
def test_a_script_that_refuses_one_of_ours_is_explained(
    option: str, explained: bool, tmp_path: Path
) -> None:
    script = tmp_path / "train.py"
    script.write_text("import argparse\nargparse.ArgumentParser().parse_args()\n")
    command = [sys.executable, "-m", "onefold", "run", "--devices", "cpu:1", str(script)]
    done = subprocess.run([*command, option, "5"], capture_output=True, text=True, timeout=600)
    assert done.returncode == 2
    assert f"unrecognized arguments: {option} 5" in done.stderr
    words = f"what stands after the script is the script's: give {option} before it"
    assert (words in done.stderr) is explained
