"""Whenever a process is killed that writes checkpoints, the last one that it wrote is there."""

from __future__ import annotations

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


class Writer:
    """Has children that write checkpoints and are killed."""

    def __init__(self) -> None:
        self._process = subprocess.Popen(
            [sys.executable, str(SCRIPT)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            bufsize=1,
        )

    def write_until_killed(self, directory: Path, first: int, changes: int) -> dict[str, int]:
        """The last number that a child has begun, and the last one that it has written."""
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._process.stdin.write(f"{directory} {first} {changes}\n")
        told = {"begun": 0, "written": 0}
        while (line := self._process.stdout.readline().split()) != ["ended"]:
            told[line[0]] = int(line[1])
        return told

    def close(self) -> None:
        assert self._process.communicate() == ("", None)
        assert self._process.returncode == 0


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
    [
        *((4, 3), (5, 3)),
        *(pytest.param(first, 1, marks=pytest.mark.full) for first in (4, 5)),
    ],
)
def test_killed_before_any_change_of_files(tmp_path: Path, first: int, every: int) -> None:
    """In the middle of replacing and of deleting too, which are over in no time.

    The first of two checkpoints is a new one and the second replaces it, or the other way round.
    """
    base, directory = tmp_path / "base", tmp_path / "checkpoints"
    for number in range(1, first):
        write(base, number)
    left: Counter[str] = Counter()
    changes, ended, writer = 0, False, Writer()
    while not ended:
        changes += every
        shutil.copytree(base, directory)
        told = writer.write_until_killed(directory, first, changes)
        ended = told["written"] == first + 1
        found = number_found(directory)
        assert max(told["written"], first - 1) <= found <= max(told["begun"], first - 1)
        left.update(left_beside(directory))
        write(directory, found + 1)
        assert left_beside(directory) == []
        assert number_found(directory) == found + 1
        assert len(list(directory.iterdir())) <= 2
        shutil.rmtree(directory)
    writer.close()
    assert left.keys() >= {"part", "lock"}
    if every == 1:
        assert left.keys() == {"part", "old", "gone", "lock"}
