"""The picture and the tables of docs/studies/speed.md, from the record of training."""

import json
import sys
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("matplotlib")

import picture
from catalog import SIDES
from picture import (
    BARS,
    LIMIT_RATIOS,
    LIMIT_SPEEDS,
    MARKS,
    TITLES,
    drawn,
    limit_table,
    tables,
    training_record,
    with_tables,
)
from tests.conftest import ROOT
from workloads import WORKLOADS

pytestmark = pytest.mark.full


def small_record(*sides: str, **settings: object) -> dict[str, Any]:
    """A record of two workloads, in which every side is twice as fast as the plain loop."""
    speed = {"median": 2.0, "low": 1.5, "high": 2.5}
    return {
        "benchmark": "training",
        "date": "2026-01-02T03:04:05+00:00",
        "versions": {"python": "3.11.0", "onefold": "0.1.0", "torch": "2.13.0"},
        "hardware": {"cpu": "Example 9000", "cores": 2},
        "settings": {"repeats": 3, **settings},
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


def small_limit(memory: str) -> dict[str, Any]:
    """A record of one workload, in which only the limit and onefold were measured."""
    value = {"median": 0.975, "low": 0.9, "high": 1.0}
    found = {"workload": "lenet", "memory": memory, "ratios": {}, "samples_per_s": {}}
    found["ratios"] = {name: {"ratio": value} for name in list(LIMIT_RATIOS)[:1]}
    found["samples_per_s"] = {name: {"median": 7145.5} for name in list(LIMIT_SPEEDS)[:2]}
    return {"benchmark": "limit", "results": [found]}


def test_every_workload_has_a_title_and_each_measured_side_a_bar() -> None:
    assert list(TITLES) == list(WORKLOADS)
    assert {bar.side for bar in BARS} <= set(SIDES)
    lenet, mlp, *unused = drawn(small_record("plain-1", "ddp-2", "onefold-2-shared")).axes
    assert [len(panel.patches) for panel in (lenet, mlp)] == [2, 2]
    assert not any(panel.patches for panel in unused)


def test_the_picture_and_the_page_are_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """From the first record of the measurement that the page is about."""
    record = small_record("plain-1", "onefold-2-shared")
    others = [{"benchmark": "start"}, *(small_record(**{n: v}) for n, v in OTHER)]
    others += [small_limit("kept"), small_limit("default")]
    for number, each in enumerate([*others, record]):
        (tmp_path / f"{number}.json").write_text(json.dumps(each), encoding="utf-8")
    output, page = tmp_path / "docs" / "speed.png", tmp_path / "speed.md"
    places = "\n".join(f"{first}\nstale\n{last}" for first, last in MARKS.values())
    page.write_text(f"before\n{places}\nafter\n", encoding="utf-8")
    arguments = ["--results", str(tmp_path), "--output", str(output), "--page", str(page)]
    monkeypatch.setattr(sys, "argv", ["picture.py", *arguments])
    picture.main()
    assert output.read_bytes().startswith(b"\x89PNG")
    first, *rows, last = page.read_text(encoding="utf-8").splitlines()
    assert (first, last) == ("before", "after")
    assert f"| LeNet | 7,150 |{'  |' * (len(BARS) - 1)} 2.00 |" in rows
    assert "| tiny perceptron | 2.00 (1.50-2.50) |  |  |" in rows
    both = "7,150 | 7,150 |  |  |  | 0.97 |  |  |  |  |"
    of_limit = [row for row in rows if row.endswith(both)]
    assert of_limit == [f"| LeNet | {both}", f"| LeNet; memory kept by all | {both}"]
    assert "stale" not in rows


OTHER: tuple[tuple[str, object], ...] = (("precisions", ["fp32", "bf16"]),)


def test_what_is_missing_is_named(tmp_path: Path) -> None:
    with pytest.raises(SystemExit, match="contains no record of training"):
        training_record(tmp_path)
    with pytest.raises(SystemExit, match="around the tables"):
        with_tables("no place", "limit", "tables")


def test_the_page_on_speed_has_the_figures_of_the_results() -> None:
    page = (ROOT / "docs" / "studies" / "speed.md").read_text(encoding="utf-8")
    results = ROOT / "benchmarks" / "results"
    assert with_tables(page, "training", tables(training_record(results))) == page
    of_limit = limit_table(results)
    assert not of_limit or with_tables(page, "limit", of_limit) == page
