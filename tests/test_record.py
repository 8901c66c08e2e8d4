from __future__ import annotations

import json
import math
from pathlib import Path

import pytest

from onefold.record import append_line, read_record


def test_lines_are_added_one_by_one(tmp_path: Path) -> None:
    lines = [{"step": 1, "loss": 0.1}, {"step": 2, "loss": None, "text": "zwei\nZeilen é"}]
    for line in lines:
        append_line(tmp_path / "run.jsonl", line)
    assert read_record(tmp_path, "run") == lines
    assert len((tmp_path / "run.jsonl").read_text().splitlines()) == 2


@pytest.mark.parametrize("number", [0.1, 1e-320, 1 / 3, -0.0, math.inf])
def test_numbers_keep_their_bits(tmp_path: Path, number: float) -> None:
    append_line(tmp_path / "run.jsonl", {"loss": number})
    (line,) = read_record(tmp_path, "run")
    assert line["loss"].hex() == number.hex()


def test_a_record_that_nobody_wrote_is_empty(tmp_path: Path) -> None:
    append_line(tmp_path / "other.jsonl", {"step": 1})
    assert read_record(tmp_path, "run") == []


def test_other_programs_can_read_it(tmp_path: Path) -> None:
    append_line(tmp_path / "run.jsonl", {"step": 1, "loss": 0.5})
    assert json.loads((tmp_path / "run.jsonl").read_text()) == {"step": 1, "loss": 0.5}


def test_a_folder_that_is_not_there_is_told(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError, match="nowhere"):
        append_line(tmp_path / "nowhere" / "run.jsonl", {})
