"""How many steps are taken, what is compared with what, and what is shown of it."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

import training
from measure import ratio, spread
from sides import Measurement
from training import COMPARISONS, best_of, compared, relative, show, step_time_s, steps_for
from workloads import WORKLOADS

pytestmark = pytest.mark.full

BENCHMARK = str(Path(training.__file__))


class Stopwatch:
    """A side whose steps take a given time."""

    def __init__(self, step_s: float) -> None:
        self.step_s = step_s
        self.told: list[int] = []

    def train(self, steps: int) -> Measurement:
        self.told.append(steps)
        return Measurement(seconds=steps * self.step_s, others_cores=0.0)


@pytest.mark.parametrize(
    ("seconds", "step_s", "expected"), [(4.0, 0.5, 8), (1.0, 0.3, 4), (0.1, 5.0, 1)]
)
def test_steps_keep_a_side_busy(seconds: float, step_s: float, expected: int) -> None:
    assert steps_for(seconds, step_s) == expected


@pytest.mark.parametrize(
    ("step_s", "told"), [(1.0, [2]), (0.03, [2, 4]), (0.001, [2, 4, 8, 16, 32, 64, 128])]
)
def test_short_steps_are_timed_by_the_hundred(step_s: float, told: list[int]) -> None:
    side = Stopwatch(step_s)
    assert step_time_s(side) == pytest.approx(step_s)  # type: ignore[arg-type]
    assert side.told == told


def test_speeds_are_told_in_terms_of_the_plain_loop() -> None:
    speeds = {"plain-1": [1.0, 2.0], "ddp-2": [3.0, 2.0]}
    assert relative(speeds)["ddp-2"] == spread([3.0, 1.0])
    assert relative({"ddp-2": [3.0]}) == {}


def test_the_best_of_several_is_the_same_in_all_rounds() -> None:
    speeds = {"ddp-2": [1.0, 9.0, 1.0], "accelerate-2": [2.0, 2.0, 2.0]}
    assert best_of(["ddp-2", "accelerate-2", "fabric-2"], speeds) == "accelerate-2"
    assert best_of(["fabric-2"], speeds) is None


def test_only_what_was_measured_is_compared() -> None:
    speeds = {"onefold-2-shared": [8.0, 6.0], "fabric-2": [4.0, 2.0], "ddp-2": [1.0, 4.0]}
    ((title, found),) = compared(speeds).items()
    assert title in {one.title for one in COMPARISONS}
    assert found == {"over": "onefold-2-shared", "under": "fabric-2", "ratio": spread([2.0, 3.0])}


def result(others_cores: float) -> dict[str, Any]:
    """What two sides of a workload came to."""
    speeds = {"plain-1": [10.0], "onefold-1": [5.0]}
    return {
        "workload": "lenet",
        "precision": "fp32",
        "samples_per_s": {name: spread(speed) for name, speed in speeds.items()},
        "peak_bytes": dict.fromkeys(speeds, 5e6),
        "relative": relative(speeds),
        "times_first": {name: ratio(speed, speed) for name, speed in speeds.items()},
        "ratios": compared(speeds),
        "others_cores": spread([others_cores]),
    }


@pytest.mark.parametrize("others_cores", [0.0, 0.7])
def test_a_busy_machine_is_told_of(others_cores: float, capsys: pytest.CaptureFixture[str]) -> None:
    show([result(others_cores)])
    shown = capsys.readouterr().out
    for text in (WORKLOADS["lenet"].title, "plain loop, one thread", "0.50 (0.50-0.50)"):
        assert text in shown
    assert ("0.70 cores busy" in shown) == bool(others_cores)


@pytest.mark.processes
def test_a_trial_run_measures_the_sides_that_were_named(tmp_path: Path) -> None:
    output = tmp_path / "training.json"
    sides = ["plain-1", "dataparallel-2", "onefold-1", "onefold-2-shared"]
    command = [sys.executable, BENCHMARK, "--workload", "mlp", "--sides", *sides]
    short = ["--repeats", "2", "--seconds", "0.05", "--output", str(output)]
    done = subprocess.run(
        [*command, *short, "--batch-size-factor", "0.5", "--precision", "fp32", "bf16"],
        capture_output=True,
        text=True,
        check=False,
        timeout=600,
    )
    assert done.returncode == 0, done.stderr
    assert "left out: dataparallel-2 is for cuda, not for cpu" in done.stderr
    record = json.loads(output.read_text(encoding="utf-8"))
    assert record["settings"]["precisions"] == [found["precision"] for found in record["results"]]
    assert [found["precision"] for found in record["results"]] == ["fp32", "bf16"]
    measured = [name for name in sides if name != "dataparallel-2"]
    assert list(record["settings"]["left_out"]) == ["dataparallel-2"]
    for found in record["results"]:
        assert list(found["samples_per_s"]) == list(found["relative"]) == measured
        assert found["batch_size"] == 32
        assert all(one["ratio"]["median"] > 0 for one in found["ratios"].values())
        assert all(one["median"] > 0 for one in found["times_first"].values())
