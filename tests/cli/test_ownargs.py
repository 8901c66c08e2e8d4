"""What stands behind a script is the script's own, whatever it is called."""

import sys
from pathlib import Path
from typing import Any

import pytest
from typer.main import get_command

from onefold.cli.main import app, main
from onefold.cli.running import come_too_late, command_of
from onefold.core.placements import described
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
    words = f"To pass {option} to onefold run, put it before the script"
    assert (words in done.stderr) is explained


@for_each(
    ("words", "text"),
    [
        ("run nowhere.py", "script nowhere.py does not exist"),
        ("run --devices 0 a-file", "devices must be at least 1, but got 0"),
        ("run --exchange pigeon a-file", "the exchange must be one of"),
        ("run --timeout 1e12 a-file", "the timeout must be finite and at most 2073600 s"),
        ("verify --steps 0 a-file", "Invalid value for '--steps'"),
        ("run --max-restarts 2 a-file", "--max-restarts requires --checkpoint DIR"),
        ("run --checkpoint a-file a-file", "--checkpoint a-file must be a folder, but is a file"),
        ("run --checkpoint c --save-every 0 a-file", "--save-every 0 is not valid: pass a number"),
        ("run --checkpoint c --keep-last 0 a-file", "keep_last must be at least 1, but got 0"),
        ("run --placement 3 a-file", f"placement must be one of {described()}, but got '3'"),
        ("run --checkpoint c --grace-period 0 a-file", "the grace period must be greater than 0"),
        ("run --offload-dir . a-file", "cannot be combined with placement replicate, because eve"),
        (
            "run --placement offload --offload-dir a-file a-file",
            "--offload-dir or ONEFOLD_OFFLOAD_DIR must be an existing folder, on a disk",
        ),
    ],
)
def test_bad_options_are_refused_before_the_script_is_started(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    words: str,
    text: str,
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "a-file").write_text("raise SystemExit('the script was started')")
    monkeypatch.setattr(sys, "argv", ["onefold", *words.split()])
    with pytest.raises(SystemExit) as ended:
        main()
    assert ended.value.code == 2
    said = capsys.readouterr().err
    assert text in said
    assert "the script was started" not in said
