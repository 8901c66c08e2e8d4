"""The picture: what is on it, and the record that it is drawn from."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("matplotlib")

import picture
from catalog import SIDES
from picture import BARS, TITLES, described, drawn, training_record
from workloads import WORKLOADS


def small_record(*sides: str) -> dict[str, Any]:
    """A record of two workloads, in which every side is twice as fast as the plain loop."""
    speed = {"median": 2.0, "low": 1.5, "high": 2.5}
    return {
        "benchmark": "training",
        "date": "2026-01-02T03:04:05+00:00",
        "versions": {"python": "3.11.0", "onefold": "0.1.0", "torch": "2.13.0"},
        "hardware": {"cpu": "Example 9000", "cores": 2},
        "settings": {"repeats": 3},
        "results": [
            {"workload": name, "relative": dict.fromkeys(sides, speed)} for name in ("lenet", "mlp")
        ],
    }


def test_every_workload_has_a_title_and_every_bar_a_side() -> None:
    assert list(TITLES) == list(WORKLOADS)
    assert {bar.side for bar in BARS} <= set(SIDES)


def test_machine_versions_and_date_are_told() -> None:
    assert described(small_record()) == (
        "Example 9000, 2 cores, PyTorch 2.13.0, Python 3.11.0, 2026-01-02"
    )


def test_each_measured_side_has_a_bar_in_each_panel() -> None:
    figure = drawn(small_record("plain-1", "ddp-2", "onefold-2-shared"))
    lenet, mlp, *unused = figure.axes
    assert [panel.get_title(loc="left") for panel in (lenet, mlp)] == ["LeNet", "tiny perceptron"]
    assert [len(panel.patches) for panel in (lenet, mlp)] == [2, 2]
    assert not any(panel.patches for panel in unused)


def test_the_picture_is_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "a.json").write_text(json.dumps({"benchmark": "start"}), encoding="utf-8")
    record = small_record("plain-1", "onefold-2-shared")
    (tmp_path / "b.json").write_text(json.dumps(record), encoding="utf-8")
    output = tmp_path / "docs" / "speed.png"
    arguments = ["--results", str(tmp_path), "--output", str(output)]
    monkeypatch.setattr(sys, "argv", ["picture.py", *arguments])
    picture.main()
    assert output.read_bytes().startswith(b"\x89PNG")


def test_no_record_is_told_of(tmp_path: Path) -> None:
    with pytest.raises(SystemExit, match="holds no record of training"):
        training_record(tmp_path)
