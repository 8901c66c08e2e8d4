"""Run folders, records, checkpoints and bundles of an attacker, through every command that reads
them: nothing is written elsewhere, nothing is executed, and whatever is wrong is one message."""

import importlib
import os
import random
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path

import pytest

from tests.jobs.crafted import CRAFTS, Program, caged, commands_for, faults_of, make_box

CASES = 200
SAMPLE = random.Random(0).sample(range(CASES), 4)
COMMANDS = 2
"""So many of a case are run in the sample."""
Paths = dict[str, Path]


@pytest.fixture(scope="module", autouse=True)
def _loaded() -> None:
    """Import once what commands import late, and not in each fork."""
    for name in (
        *("matplotlib.figure", "onefold.cli.records", "onefold.cli.replay", "torch._dynamo"),
        *("onefold_jobs.cli.train", "onefold_jobs.export", "onefold_jobs.report"),
    ):
        importlib.import_module(name)


def check(numbers: Sequence[int], runs: Paths, data: Paths, folder: Path, most: int = 100) -> None:
    faults = [each for n in numbers for each in faults_of(folder / str(n), n, runs, data, most)]
    assert not faults, "\n\n".join(faults)


def test_a_few_crafted_runs_do_no_harm(runs: Paths, data: Paths, tmp_path: Path) -> None:
    check(SAMPLE, runs, data, tmp_path, COMMANDS)


@pytest.mark.full
@pytest.mark.parametrize("kind", range(len(CRAFTS)), ids=[each.__name__ for each in CRAFTS])
def test_two_hundred_crafted_runs_do_no_harm(
    kind: int, runs: Paths, data: Paths, tmp_path: Path
) -> None:
    check(range(kind, CASES, len(CRAFTS)), runs, data, tmp_path)


def write_at_home() -> None:
    Path("~/.bash_profile").expanduser().write_text("evil\n")


def write_elsewhere() -> None:
    Path("../../elsewhere").absolute().touch()


def start_a_program() -> None:
    subprocess.run(["true"], check=True)


def import_what_is_planted() -> None:
    sys.path.insert(0, "")
    importlib.import_module("sitecustomize_")


def print_an_escape() -> None:
    print("\x1b[2J")


def raise_an_error() -> None:
    raise KeyError("evil")


def take_memory() -> None:
    # Write to it: Python 3.13 does not touch the memory of an empty bytearray.
    assert len(b"x" * (1 << 30))


def leave_a_file() -> None:
    tempfile.mkdtemp()


def end_by_a_signal() -> None:
    os.kill(os.getpid(), 9)


@pytest.mark.parametrize(
    ("program", "words"),
    [
        (write_at_home, "changed: home/.bash_profile"),
        (write_elsewhere, "wrote "),
        (start_a_program, "started "),
        (import_what_is_planted, "planted code was run"),
        (print_an_escape, r"printed '\x1b'"),
        (raise_an_error, "a traceback"),
        (take_memory, "took "),
        (leave_a_file, "left behind in the temporary folder"),
        (end_by_a_signal, "ended with -9"),
    ],
)
def test_the_cage_notices(
    program: Program, words: str, runs: Paths, data: Paths, tmp_path: Path
) -> None:
    box = make_box(tmp_path / "box", 10, runs, data)
    wrong, text = caged(box, commands_for(box)[0], program)
    assert any(each.startswith(words) for each in wrong), (wrong, text)
    box = make_box(tmp_path / "other", 10, runs, data)
    assert caged(box, [], lambda: None) == ([], "")
