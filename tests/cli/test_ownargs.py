"""What stands behind a script is the script's own, whatever it is called."""

from pathlib import Path
from typing import Any

import pytest
from typer.main import get_command

from onefold.cli.main import app
from onefold.cli.running import come_too_late, command_of
from tests.started import ended
from tests.tables import for_each

OWN = {"-m", "--devices", "--timeout", "--placement"}


@for_each(
    ("given", "taken"),
    [
        ("-m train --devices 2", "-m train --devices 2"),
        ("--devices 2 -m train x -m y", "-m train x -m y"),
        ("-m train -- --devices 2", "-m train --devices 2"),
        ("-m -- train --devices 2", "-m train --devices 2"),
        ("-- {script} -m x", "{script} -m x"),
        ("{script} -- --devices 2", "{script} -- --devices 2"),
        ("--placement -m -m train -x", "-m train -x"),
    ],
)
def test_the_commands_own_end_with_the_script(given: str, taken: str) -> None:
    command: Any = get_command(app)
    words = [__file__ if word == "{script}" else word for word in given.split()]
    context = command.commands["run"].make_context("run", words)
    found = command_of(context.params["script"], context.params["module"], context.args)
    assert found == [__file__ if word == "{script}" else word for word in taken.split()]


def test_options_of_the_command_behind_a_script_are_found() -> None:
    assert come_too_late(["--lr", "1", "--devices=2", "-m"], OWN) == ["--devices", "-m"]
    assert come_too_late(["--device", "2"], OWN) == []
    assert come_too_late(["script"], {*OWN, "script"}) == []  # an argument of the command


@pytest.mark.processes
@for_each(("option", "explained"), [("--timeout", True), ("--lr", False)])
def test_a_script_that_refuses_one_of_ours_is_explained(
    option: str, explained: bool, tmp_path: Path
) -> None:
    script = tmp_path / "train.py"
    script.write_text("import argparse\nargparse.ArgumentParser().parse_args()\n")
    done = ended("run", "--devices", "cpu:1", str(script), option, "5")
    assert done.returncode == 2
    assert f"unrecognized arguments: {option} 5" in done.stderr
    words = f"what stands after the script is the script's: give {option} before it"
    assert (words in done.stderr) is explained
