"""Medians, ratios, turns and the record: what the figures of every benchmark rest on."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from measure import (
    Spread,
    busy_s,
    cpu_model,
    deliver,
    in_turn,
    middle_half,
    print_table,
    ratio,
    record,
    spread,
)

pytestmark = pytest.mark.full

TIMES = st.lists(st.floats(min_value=1e-6, max_value=1e6), min_size=1, max_size=9)


@pytest.mark.parametrize(
    ("values", "expected"),
    [
        ([3.0], Spread(median=3.0, low=3.0, high=3.0)),
        ([9.0, 1.0, 2.0], Spread(median=2.0, low=1.0, high=9.0)),
        ([4.0, 1.0, 2.0, 8.0], Spread(median=3.0, low=1.0, high=8.0)),
    ],
)
def test_spread_is_median_least_and_greatest(values: list[float], expected: Spread) -> None:
    assert spread(values) == expected


@given(TIMES)
def test_spread_does_not_depend_on_the_order(values: list[float]) -> None:
    found = spread(values)
    assert found == spread(reversed(values))
    assert found.low <= found.median <= found.high


def test_spread_of_nothing_is_refused() -> None:
    with pytest.raises(ValueError, match="at least one measurement"):
        spread([])


def test_spread_as_text() -> None:
    assert Spread(median=1234.56, low=0.0, high=9999.0).text(1) == "1,234.6 (0.0-9,999.0)"


def test_middle_half_leaves_out_what_is_far_off() -> None:
    assert middle_half([4.0, 1.0, 900.0, 2.0, 3.0]) == Spread(median=3.0, low=2.0, high=4.0)


def test_ratio_is_taken_round_by_round() -> None:
    # Between the medians it would be 20 / 2 = 10.
    assert ratio([10.0, 20.0, 90.0], [1.0, 10.0, 2.0]) == Spread(median=10.0, low=2.0, high=45.0)
    assert ratio([10.0, 20.0, 30.0], [10.0, 2.0, 1.0]) == Spread(median=10.0, low=1.0, high=30.0)


@given(TIMES)
def test_ratio_to_itself_is_one(times: list[float]) -> None:
    assert ratio(times, times) == Spread(median=1.0, low=1.0, high=1.0)


def test_ratio_needs_as_many_rounds_on_both_sides() -> None:
    with pytest.raises(ValueError, match="shorter"):
        ratio([1.0, 2.0], [1.0])


def test_measurements_are_taken_in_turn_and_every_second_time_backwards() -> None:
    calls: list[str] = []

    def measure(name: str) -> int:
        calls.append(name)
        return len(calls)

    taken = in_turn({"a": lambda: measure("a"), "b": lambda: measure("b")}, rounds=3)
    assert calls == ["a", "b", "b", "a", "a", "b"]
    assert taken == {"a": [1, 4, 5], "b": [2, 3, 6]}


def test_no_rounds_are_refused() -> None:
    with pytest.raises(ValueError, match="at least one round, got 0"):
        in_turn({}, rounds=0)


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("processor\t: 0\nmodel name\t: Example 9000: fast\ncpu MHz\t: 1\n", "Example 9000: fast"),
        ("processor\t: 0\n", "unknown"),
        ("", "unknown"),
    ],
)
def test_cpu_model(text: str, expected: str) -> None:
    assert cpu_model(text) == expected


def test_busy_seconds_leave_out_idling_and_waiting_for_disks() -> None:
    stat = "cpu  100 20 30 90000 8000 4 5 41 7 8\ncpu0 1 2 3 4 5 6 7 8 9 10\n"
    assert busy_s(stat, ticks_per_s=100) == 2.0


def test_record_is_one_line_of_json(capsys: pytest.CaptureFixture[str]) -> None:
    results = [{"workload": "w", "ratios": {"a/b": spread([1.0, 2.0, 4.0])}}]
    deliver(record("training", settings={"repeats": 3}, results=results), None)
    (line,) = capsys.readouterr().out.splitlines()
    found = json.loads(line)
    assert found["benchmark"] == "training"
    assert found["settings"] == {"repeats": 3}
    assert found["results"][0]["ratios"]["a/b"] == {"median": 2.0, "low": 1.0, "high": 4.0}
    assert set(found["versions"]) >= {"python", "onefold", "torch"}
    assert set(found["hardware"]) == {"cpu", "cores"}
    assert found["hardware"]["cores"] >= 1


def test_record_is_written_indented_where_asked(tmp_path: Path) -> None:
    output = tmp_path / "results" / "one.json"
    for repeats in (3, 4):
        deliver(record("one", settings={"repeats": repeats}, results=[spread([1.0])]), output)
    text = output.read_text(encoding="utf-8")
    assert json.loads(text)["results"] == [{"median": 1.0, "low": 1.0, "high": 1.0}]
    assert '\n  "settings": {\n    "repeats": 4\n  }' in text
    assert list(output.parent.iterdir()) == [output]


def test_table_shows_every_cell(capsys: pytest.CaptureFixture[str]) -> None:
    print_table("Speeds", ["workload", "plain"], [["first", "1.5 (1.0-2.0)"], ["second", "7"]])
    shown = capsys.readouterr().out
    for cell in ("Speeds", "workload", "plain", "first", "1.5 (1.0-2.0)", "second", "7"):
        assert cell in shown
