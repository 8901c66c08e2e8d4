"""Whenever a process is killed that writes checkpoints, the last one that it wrote is there."""

from __future__ import annotations

import os
import random
import shutil
import signal
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import pytest
from safetensors.torch import load_file

from onefold.checkpoint.folder import find_checkpoint
from tests.scripts.writing import NUMEL, write

SCRIPT = Path(__file__).parent.parent / "scripts" / "writing.py"
KILLS = 60
pytestmark = [pytest.mark.full, pytest.mark.processes, pytest.mark.xdist_group("faults")]


class Writer:
    """Has children that write checkpoints and are killed."""

    def __init__(self) -> None:
        self.process = subprocess.Popen(
            [sys.executable, str(SCRIPT)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            bufsize=1,
        )

    def start(self, directory: Path, first: int, *, changes: int = 0) -> int:
        """Process id of a new child."""
        assert self.process.stdin is not None
        self.process.stdin.write(f"{directory} {first} {changes}\n")
        ((word, pid),) = self._words(1)
        assert word == "child"
        return pid

    def wait(self) -> Counter[str]:
        """The last number that a child that has ended had begun, and the last it had written."""
        told: Counter[str] = Counter()
        while words := self._words(1):
            told.update({word: number - told[word] for word, number in words})
        return told

    def close(self) -> None:
        assert self.process.stdin is not None
        assert self.process.stdout is not None
        self.process.stdin.close()
        self.process.stdout.close()
        assert self.process.wait() == 0

    def _words(self, number: int) -> list[tuple[str, int]]:
        assert self.process.stdout is not None
        lines = [self.process.stdout.readline().split() for _ in range(number)]
        return [(line[0], int(line[1])) for line in lines if line != ["ended"]]


@pytest.fixture(scope="module")
def writer() -> Iterator[Writer]:
    writer = Writer()
    yield writer
    writer.close()


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


def check_after_kill(directory: Path, told: Counter[str], before: int) -> tuple[int, list[str]]:
    """The number that was found, and what was left until the next writing."""
    found = number_found(directory)
    assert max(told["written"], before) <= found <= max(told["begun"], before)
    left = left_beside(directory)
    write(directory, found + 1)
    assert left_beside(directory) == []
    assert number_found(directory) == found + 1
    assert len(list(directory.iterdir())) <= 2
    return found, left


def test_killed_at_any_moment(tmp_path: Path, writer: Writer) -> None:
    rng = random.Random(0)
    write(tmp_path, 1)
    number, left = 1, Counter[str]()
    for _ in range(KILLS):
        child = writer.start(tmp_path, number + 1)
        time.sleep(rng.uniform(0, 0.06))
        os.kill(child, signal.SIGKILL)
        found, beside = check_after_kill(tmp_path, writer.wait(), number)
        number = found + 1
        left.update(beside)
    print(f"{KILLS} kills left {dict(left)}")
    assert left["part"] > 0


@pytest.mark.parametrize("first", [4, 5], ids=["new and replacing", "replacing and new"])
def test_killed_before_any_change(tmp_path: Path, writer: Writer, first: int) -> None:
    """In the middle of replacing and of deleting too, which are over in no time."""
    base = tmp_path / "base"
    for number in range(1, first):
        write(base, number)
    left: Counter[str] = Counter()
    changes, ended = 0, False
    while not ended:
        changes += 1
        directory = tmp_path / "checkpoints"
        shutil.copytree(base, directory)
        writer.start(directory, first, changes=changes)
        told = writer.wait()
        ended = told["written"] == first + 1
        _, beside = check_after_kill(directory, told, first - 1)
        left.update(beside)
        shutil.rmtree(directory)
    print(f"{changes} kills left {dict(left)}")
    assert left.keys() == {"part", "old", "gone", "lock"}
