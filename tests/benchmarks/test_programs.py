"""Every benchmark, as a program on the smallest input: its record, and what must hold of it."""

import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from catalog import PEERS
from network import why_not
from tests.conftest import ROOT

pytestmark = [pytest.mark.full, pytest.mark.processes]

Results = list[dict[str, Any]]


def run(program: str, *options: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, str(ROOT / "benchmarks" / f"{program}.py"), *options]
    return subprocess.run(command, capture_output=True, text=True, check=False, timeout=600)


def against(results: Results) -> None:
    """A version beside itself."""
    assert [found["side"] for found in results] == ["onefold-1"]
    assert 0.1 < results[0]["ratio"]["median"] < 10


def checkpoint(results: Results) -> None:
    assert [found["devices"] for found in results] == [2, 1]
    for found in results:
        assert set(found["stall_percent"]) == {"median", "low", "high"}
        assert len(found["calls"]) == 5
        assert all(call["mb_per_s"]["low"] > 0 for call in found["calls"].values())


def compiling(results: Results) -> None:
    """A cold start has to compile what a warm one finds."""
    measured, started = results
    assert measured["rounds"] >= 2
    assert all(spread["low"] > 0 for spread in measured["step_ms"].values())
    first = started["first_step_s"]
    assert first["compiled, 1 device, cold"] > first["as written, 1 device"]


def exchange(results: Results) -> None:
    for found in results:
        assert set(found["microseconds"]) > set(found["times_as_fast_as_gloo"])


def large_models(results: Results) -> None:
    """Two sides train the same model."""
    ours, ddp = results
    assert (ours["side"], ddp["side"]) == ("onefold-replicate-shared", "ddp")
    assert ours["loss"] == pytest.approx(ddp["loss"], rel=1e-5)
    assert all(one["kept_bytes"]["Pss"] > 0 and one["cpu_s"] > 0 for one in results)


def limit(results: Results) -> None:
    """Each side is started, if it is installed, with both kinds of memory."""
    assert [found["memory"] for found in results] == ["default", "kept"]
    for found in results:
        measured = set(found["samples_per_s"])
        assert {"limit-2", "limit-1", "onefold-2-shared", "ddp-2"} <= measured
        assert len(found["ratios"]) == 5
        ours, bound = found["phases_ms"]["onefold-2-shared"], found["phases_ms"]["limit-2"]
        assert len(ours) == len(bound) == 2
        assert all(one[name] > 0 for one in (*ours, *bound) for name in ("forward", "update"))


def overhead(results: Results) -> None:
    """The program itself holds the bits of both loops against each other."""
    assert [len(results[0][name]) for name in ("step_us", "own_us")] == [4, 2]


def recording(results: Results) -> None:
    assert [found["devices"] for found in results] == [1, 2]
    for found in results:
        assert found["bytes"] > 100
        assert all(found[name]["median"] > 0 for name in ("recorded", "audited"))


def scaling(results: Results) -> None:
    """Both exchanges send what the model of `docs/studies/scaling.md` says."""
    ways = [(found["exchange"], found["devices"]) for found in results]
    assert ways == [(name, n) for name in ("collective", "shared") for n in (2, 3)]
    for found in results:
        expected = {name: value for name, value in found["predicted"].items() if name != "memory"}
        measured = {name: found["measured"][name] for name in expected}
        assert measured == pytest.approx(expected, rel=0.1)  # partitions are cut at whole segments
        assert measured["messages"] == pytest.approx(expected["messages"])
        assert found["memory_after"]["pss"] > found["memory_before"]["pss"]


def shards(results: Results) -> None:
    assert list(results[0]["step_s"]) == ["onefold 1", "bare 1", "onefold 3", "bare 3"]
    assert results[0]["to_one"]["1"] == {"median": 1.0, "low": 1.0, "high": 1.0}


def accumulation(results: Results) -> None:
    assert [found["shards_a_device"] for found in results] == [1, 2]
    assert all(found["samples_per_s"]["low"] > 0 for found in results)


def start(results: Results) -> None:
    (found,) = results
    assert len(found["seconds"]) == 3
    assert set(found["times_the_reference"]) == set(found["seconds"])


def network(results: Results) -> None:
    """The bytes must pass the cable. A device that is late finds a part of them there already."""
    (found,) = results
    assert found["measured_s"]["low"] > 0.5 * found["parameter_bytes"] / (100e6 / 8)
    assert not any(name.startswith("of") for name in hosts())


def hosts() -> list[str]:
    """Network namespaces of this machine."""
    return os.listdir("/run/netns") if os.path.isdir("/run/netns") else []


def training(results: Results) -> None:
    """Every side of two processes is started and trains, if it is installed."""
    assert [found["precision"] for found in results] == ["fp32", "bf16"]
    for found in results:
        measured = list(found["samples_per_s"])
        assert {"plain-1", "onefold-1", "onefold-2-shared", "ddp-2"} <= set(measured)
        assert list(found["relative"]) == measured
        assert found["batch_size"] == 32
        assert all(one["ratio"]["median"] > 0 for one in found["ratios"].values())


SMALL = "--width 32 --layers 2 --vocabulary 50 --length 16 --batch-size 4 --shards 4 --processes 2"
SIDES = f"plain-1 dataparallel-2 onefold-1 onefold-2-shared {' '.join(PEERS)}"
PROGRAMS: dict[Callable[[Results], None], str] = {
    against: f"{ROOT}/src --workload mlp --sides onefold-1 --starts 2 --repeats 1 --seconds 0.05",
    checkpoint: "--workload mlp --devices 2 1 --every 2 --rounds 2 --directory FOLDER",
    compiling: "--workload mlp --seconds 0.2 --start mlp",
    exchange: "--repeats 1",
    large_models: f"{SMALL} --steps 2 --sides onefold-replicate-shared,ddp",
    limit: "--workload mlp --repeats 2 --seconds 0.05",
    overhead: "--workload mlp --seconds 0.05",
    recording: "--workload mlp --rounds 2 --seconds 0.05",
    scaling: "--devices 2 3 --parameters 200000 --steps 2",
    network: "--network --mbit 100 --parameters 1000000 --steps 2",
    shards: "--workload mlp --shards 1 3 --rounds 2",
    accumulation: "--accumulation --each 1 2 --samples 1 --rounds 1",
    start: "--repeats 1",
    training: f"--workload mlp --sides {SIDES} --repeats 2 --seconds 0.05 --batch-size-factor 0.5 "
    "--precision fp32 bf16",
}


@pytest.mark.parametrize("check", PROGRAMS, ids=lambda check: check.__name__)
def test_a_small_run_leaves_a_record_and_nothing_else(
    check: Callable[[Results], None], tmp_path: Path
) -> None:
    name = check.__name__
    folder, output = tmp_path / "folder", tmp_path / "record.json"
    folder.mkdir()
    words = PROGRAMS[check].replace("FOLDER", str(folder)).split()
    place = ("--json" if name == "large_models" else "--output", str(output))
    if name == "network" and (reason := why_not()):
        pytest.skip(f"a network {reason}")
    done = run({"accumulation": "shards", "network": "scaling"}.get(name, name), *words, *place)
    assert done.returncode == 0, done.stderr
    record = json.loads(output.read_text(encoding="utf-8"))
    assert json.loads(done.stdout.splitlines()[-1]) == record
    assert record["benchmark"] == {"network": "scaling-network"}.get(name, name)
    assert set(record["versions"]) >= {"python", "onefold", "torch"}
    assert not list(folder.iterdir())
    if name == "training":
        left_out = record["settings"]["left_out"]
        assert left_out["dataparallel-2"] == "is for cuda, not for cpu"
    check(record["results"])


def test_predictions_and_refusals() -> None:
    predicted = run("scaling", "--predict")
    assert predicted.returncode == 0, predicted.stderr
    assert "Predicted: 1 GB of gradients" in predicted.stdout
    for program, options, words in (
        ("scaling", ["--devices", "9"], "1 to 8 devices for 8 shards"),
        ("checkpoint", ["--every", "0"], "at least one step"),
        ("against", [str(ROOT / "src"), "--starts", "3"], "expected an even number, got 3"),
        ("against", [str(ROOT)], "the folder that holds the package onefold"),
    ):
        refused = run(program, *options)
        assert (refused.returncode, words in refused.stderr) == (2, True), refused.stderr
