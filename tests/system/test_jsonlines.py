import json
import math
import os
from pathlib import Path

import pytest

from onefold.system.safe_files import append_line, read_record
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


@for_each("kind", ["link", "pipe", "folder"])
def test_a_line_is_written_through_no_link_or_pipe(tmp_path: Path, kind: str) -> None:
    path, target = tmp_path / "lines", tmp_path / "target"
    append_line(target, {"step": 1})
    make = {"link": lambda: path.symlink_to(target), "pipe": lambda: os.mkfifo(path)}
    make.get(kind, path.mkdir)()
    before = target.read_text()
    with pytest.raises(OSError, match=r"expected a file|Is a directory"):
        append_line(path, {"step": 2})
    assert target.read_text() == before
