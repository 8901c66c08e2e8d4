"""Whenever a process is killed that writes checkpoints, the last one that it wrote is there."""

import os
import shutil
import subprocess
import sys
from collections import Counter
from pathlib import Path

import pytest
from safetensors.torch import load_file

from onefold.checkpoint.folder import find_checkpoint
from tests.scripts.writing import NUMEL, write

SCRIPT = Path(__file__).parent.parent / "scripts" / "writing.py"
pytestmark = [pytest.mark.processes, pytest.mark.xdist_group("faults")]


def number_found(directory: Path) -> int:
    """Of the newest checkpoint, all of whose values are its number."""
    found = find_checkpoint(directory)
    number = int(found.run["number"])
    for name in found.run["files"]:
        values = load_file(found.folder / name)["values"]
        assert values.tolist() == [number] * NUMEL
    return number


def left_beside(directory: Path) -> list[str]:
    return [name.rpartition(".")[2] for name in os.listdir(directory) if name.startswith(".")]


@pytest.mark.parametrize(
    ("first", "every"),
    [*((4, 6), (5, 7)), *(pytest.param(first, 1, marks=pytest.mark.full) for first in (4, 5))],
)
def test_killed_before_any_change_of_files(tmp_path: Path, first: int, every: int) -> None:
    """In the middle of replacing and of deleting too, which are over in no time.

    The first of two checkpoints is a new one and the second replaces it, or the other way round.
    """
    base, directory = tmp_path / "base", tmp_path / "checkpoints"
    for number in range(1, first):
        write(base, number)
    left: Counter[str] = Counter()
    changes, ended = 0, False
    while not ended:
        changes += every
        shutil.copytree(base, directory)
        asked = f"{directory} {first} {changes}\n"
        said = subprocess.check_output([sys.executable, str(SCRIPT)], input=asked, text=True)
        words = (line.split() for line in said.splitlines() if " " in line)
        told = {"begun": 0, "written": 0, **{word: int(number) for word, number in words}}
        ended = told["written"] == first + 1
        found = number_found(directory)
        assert max(told["written"], first - 1) <= found <= max(told["begun"], first - 1)
        left.update(left_beside(directory))
        write(directory, found + 1)
        assert left_beside(directory) == []
        assert number_found(directory) == found + 1
        assert len(list(directory.iterdir())) <= 2
        shutil.rmtree(directory)
    assert left.keys() >= {"part", "lock"}
    if every == 1:
        assert left.keys() == {"part", "old", "gone", "lock"}
