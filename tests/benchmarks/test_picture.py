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
from picture import BARS, TITLES, described, drawn, samples, tables, training_record, with_tables
from tests.conftest import ROOT
from workloads import WORKLOADS

pytestmark = pytest.mark.full


def small_record(*sides: str) -> dict[str, Any]:
    """A record of two workloads, in which every side is twice as fast as the plain loop."""
    speed = {"median": 2.0, "low": 1.5, "high": 2.5}
    return {
        "benchmark": "training",
        "date": "2026-01-02T03:04:05+00:00",
        "versions": {"python": "3.11.0", "onefold": "0.1.0", "torch": "2.13.0"},
        "hardware": {"cpu": "Example 9000", "cores": 2},
        "settings": {"repeats": 3, "keep_memory": False},
        "results": [
            {
                "workload": name,
                "samples_per_s": {"plain-1": {"median": 7145.5}},
                "relative": dict.fromkeys(sides, speed),
                "ratios": {"onefold, 2 devices / 1 device": {"ratio": speed}},
            }
            for name in ("lenet", "mlp")
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
    output, page = tmp_path / "docs" / "speed.png", tmp_path / "speed.md"
    page.write_text(f"before\n{picture.BEGIN}\nstale\n{picture.END}\nafter\n", encoding="utf-8")
    arguments = ["--results", str(tmp_path), "--output", str(output), "--page", str(page)]
    monkeypatch.setattr(sys, "argv", ["picture.py", *arguments])
    picture.main()
    assert output.read_bytes().startswith(b"\x89PNG")
    first, *_, last = page.read_text(encoding="utf-8").splitlines()
    assert (first, last) == ("before", "after")
    assert "stale" not in page.read_text(encoding="utf-8")


def test_no_record_is_told_of(tmp_path: Path) -> None:
    with pytest.raises(SystemExit, match="holds no record of training"):
        training_record(tmp_path)


@pytest.mark.parametrize(
    ("name", "value"),
    [("keep_memory", True), ("precisions", ["bf16"]), ("precisions", ["fp32", "bf16"])],
)
def test_a_record_of_another_measurement_is_passed_over(
    tmp_path: Path, name: str, value: object
) -> None:
    wanted, other = small_record("plain-1"), small_record("plain-1")
    other["settings"][name] = value
    (tmp_path / "a.json").write_text(json.dumps(other), encoding="utf-8")
    (tmp_path / "b.json").write_text(json.dumps(wanted), encoding="utf-8")
    assert training_record(tmp_path) == wanted


def test_tables_have_a_row_for_each_workload_and_empty_cells_for_what_was_not_measured() -> None:
    lines = tables(small_record("plain-1", "onefold-2-shared")).strip().splitlines()
    assert lines[2] == f"| LeNet | 7,150 |{'  |' * (len(BARS) - 1)} 2.00 |"
    assert lines[-1] == "| tiny perceptron | 2.00 (1.50-2.50) |  |  |"


@pytest.mark.parametrize(
    ("value", "text"), [(132_003.1, "132,000"), (122.2, "122"), (45.06, "45.1"), (3.4, "3.40")]
)
def test_speeds_are_told_to_three_digits(value: float, text: str) -> None:
    assert samples(value) == text


def test_a_page_without_a_place_for_the_tables_is_refused() -> None:
    with pytest.raises(SystemExit, match="around its tables"):
        with_tables("no place", "tables")


def test_the_page_on_speed_has_the_figures_of_the_results() -> None:
    page = (ROOT / "docs" / "speed.md").read_text(encoding="utf-8")
    assert with_tables(page, tables(training_record(ROOT / "benchmarks" / "results"))) == page
