import json
import math
import os
from pathlib import Path

import pytest

from onefold.system.record import append_line, check_trace, keep_steps, read_record
from tests.tables import for_each


def test_lines_are_added_one_by_one(tmp_path: Path) -> None:
    assert read_record(tmp_path, "run") == []
    numbers = [0.1, 1e-320, 1 / 3, -0.0, math.inf]
    lines = [{"step": 1, "loss": numbers}, {"step": 2, "loss": None, "text": "zwei\nZeilen é"}]
    for line in lines:
        append_line(tmp_path / "run.jsonl", line)
    first, second = (tmp_path / "run.jsonl").read_text().splitlines()
    assert [json.loads(first), json.loads(second)] == read_record(tmp_path, "run") == lines
    found = read_record(tmp_path, "run")[0]["loss"]
    assert [number.hex() for number in found] == [number.hex() for number in numbers]
    with pytest.raises(FileNotFoundError, match="nowhere"):
        append_line(tmp_path / "nowhere" / "run.jsonl", {})


def trace(path: Path, *steps: int) -> None:
    for step in steps:
        append_line(path, {"step": step, "epoch": 0, "loss": 0.5})


@for_each("rest", ["", "{", '{"step"', '{"step": 4, "lo'])
def test_steps_after_the_last_are_dropped_and_what_was_cut_off(tmp_path: Path, rest: str) -> None:
    path = tmp_path / "trace"
    check_trace(path)
    assert os.listdir(tmp_path) == []
    keep_steps(path, 0)
    assert path.read_text() == ""
    trace(path, 1, 2, 3)
    path.chmod(0o640)
    with path.open("a") as file:
        file.write(rest)
    check_trace(path)
    keep_steps(path, 2)
    assert [json.loads(line)["step"] for line in path.read_text().splitlines()] == [1, 2]
    assert path.stat().st_mode & 0o777 == 0o640
    assert os.listdir(tmp_path) == ["trace"]


@for_each(
    "text",
    [
        *("Buy milk.\n", "Buy milk.", "1\n2\n", '{"step": 1}\n', "[" * 20_000 + "\n", "\0\udcff"),
        '{"step": 1, "loss": 0.5}\nBuy milk.\n',
        '{"step": 1, "loss": "' + "x" * 100_000 + '"}\n',
    ],
)
def test_a_file_that_is_no_trace_is_left_as_it_is(tmp_path: Path, text: str) -> None:
    path = tmp_path / "notes.txt"
    path.write_text(text, errors="surrogateescape")
    before = path.read_bytes()
    for use in (check_trace, lambda path: keep_steps(path, 0)):
        with pytest.raises(ValueError, match="not a trace that onefold wrote"):
            use(path)
    assert path.read_bytes() == before


@for_each("kind", ["link", "pipe", "folder"])
def test_a_trace_is_written_through_no_link_or_pipe(tmp_path: Path, kind: str) -> None:
    path, target = tmp_path / "trace", tmp_path / "target"
    trace(target, 1)
    make = {"link": lambda: path.symlink_to(target), "pipe": lambda: os.mkfifo(path)}
    make.get(kind, path.mkdir)()
    before = target.read_text()
    for write in (lambda: keep_steps(path, 0), lambda: trace(path, 2)):
        with pytest.raises(OSError, match=r"expected a file|Is a directory"):
            write()
    assert target.read_text() == before
