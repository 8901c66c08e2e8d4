"""What the figures of every benchmark rest on."""

import json
from pathlib import Path

import pytest

from against import there_and_back
from checkpoint import file_system_of, stall_percent
from measure import Spread, busy_s, deliver, in_turn, middle_half, ratio, record, spread
from overhead import difference
from scaling import rollup_bytes, sent_over
from training import best_of, compared

pytestmark = pytest.mark.full


def test_ratios_and_differences_are_taken_round_by_round() -> None:
    assert spread([4.0, 1.0, 2.0, 8.0]) == Spread(median=3.0, low=1.0, high=8.0)
    # Between the medians it would be 20 / 2 = 10.
    assert ratio([10.0, 20.0, 30.0], [10.0, 2.0, 1.0]) == Spread(median=10.0, low=1.0, high=30.0)
    assert difference([5.0, 105.0, 6.0], [1.0, 100.0, 3.0]) == Spread(median=4.0, low=3.5, high=4.5)
    stall = stall_percent([11.0, 20.4, 10.1], [10.0, 20.0, 10.0])
    assert [stall.low, stall.median, stall.high] == pytest.approx([1.0, 2.0, 10.0])
    assert middle_half([4.0, 1.0, 900.0, 2.0, 3.0]) == Spread(median=3.0, low=2.0, high=4.0)
    with pytest.raises(ValueError, match="shorter"):
        ratio([1.0, 2.0], [1.0])
    with pytest.raises(ValueError, match="at least one measurement"):
        spread([])


def test_the_place_in_a_row_is_worth_nothing() -> None:
    calls: list[str] = []

    def measure(name: str) -> int:
        calls.append(name)
        return len(calls)

    taken = in_turn({"a": lambda: measure("a"), "b": lambda: measure("b")}, rounds=3)
    assert calls == ["a", "b", "b", "a", "a", "b"]
    assert taken == {"a": [1, 4, 5], "b": [2, 3, 6]}
    # Two equal versions; the one measured second takes 2 s, the other 3 s, and all slow down.
    assert ratio(there_and_back([2.0, 5.0]), there_and_back([3.0, 4.0])).median == 1.0


def test_a_side_is_compared_with_the_best_of_those_that_were_measured() -> None:
    speeds = {"onefold-2-shared": [8.0, 6.0], "fabric-2": [4.0, 2.0], "ddp-2": [1.0, 4.0]}
    (found,) = compared(speeds).values()
    assert found == {"over": "onefold-2-shared", "under": "fabric-2", "ratio": spread([2.0, 3.0])}
    assert best_of(["accelerate-2"], speeds) is None


def test_what_the_kernel_says() -> None:
    stat = "cpu  100 20 30 90000 8000 4 5 41 7 8\ncpu0 1 2 3 4 5 6 7 8 9 10\n"
    assert busy_s(stat, ticks_per_s=100) == 2.0
    wire = sent_over("head\nhead\n    lo: 1 2 0 0 0 0 0 0 30 4 0 0 0 0 0 0\n", "lo")
    assert (wire.sent_bytes, wire.packets) == (30, 4)
    assert rollup_bytes("Rss:  2048 kB\nPss:  1024 kB\nPss_Dirty:  5 kB\n", "Pss") == 1024 * 1024
    mounts = "/dev/a / ext4 rw 0 0\ntmpfs /tmp tmpfs rw 0 0\n/dev/b /data xfs rw 0 0\n"
    kinds = [file_system_of(Path(path), mounts) for path in ("/tmp/a", "/tmpfile", "/data")]
    assert kinds == ["tmpfs", "ext4", "xfs"]


def test_a_record_is_one_line_and_a_whole_file(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    output = tmp_path / "results" / "one.json"
    results = [{"ratios": {"a/b": spread([1.0, 2.0, 4.0])}}]
    for repeats in (3, 4):
        deliver(record("one", settings={"repeats": repeats}, results=results), output)
    *_, line = capsys.readouterr().out.splitlines()
    found = json.loads(line)
    assert found == json.loads(output.read_text(encoding="utf-8"))
    assert found["settings"] == {"repeats": 4}
    assert found["results"] == [{"ratios": {"a/b": {"median": 2.0, "low": 1.0, "high": 4.0}}}]
    assert list(output.parent.iterdir()) == [output]
