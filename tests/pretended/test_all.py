"""Runs the tests that need the pretended accelerator, in processes that have it.

A process with such devices has no others, and must not be forked: so they are kept apart from all
other tests. Those of this folder prove the pretended accelerator itself; those of ``tests/gpu`` are
written for any GPU.
"""

import json
import subprocess
import sys
from pathlib import Path

import pytest

from onefold.core.placements import implementation_of
from onefold.placement.footprint import Footprint
from tests.conftest import ROOT
from tests.gpu.parts import missing
from tests.pretended import build
from tests.scripts import peak_bytes

pytestmark = [
    pytest.mark.processes,
    pytest.mark.fresh,
    pytest.mark.skipif(build.missing() is not None, reason=f"needs {build.missing()}"),
]
LIMIT_S = 800
GRAPHS = "tests/gpu/test_graphs.py"
BITS = "test_captured_shards_have_the_bits_of_eager_ones"
USUAL = (
    "tests/gpu/test_devices.py",
    "tests/gpu/test_bits.py::test_batches_may_lie_anywhere",
    "tests/gpu/test_bits.py::test_two_cards_have_the_bits_of_one",
    *(f"{GRAPHS}::{BITS}[{case}]" for case in ("3 of 8", "metrics", "short last batch")),
    f"{GRAPHS}::test_a_number_that_changes_is_not_frozen[hidden_once]",
    f"{GRAPHS}::test_a_defect_of_a_replay_is_found_before_its_result_counts[memory]",
)
MODULES = sorted(path.name for path in (ROOT / "tests" / "gpu").glob("test_*.py"))


def passes(*tests: str) -> None:
    """Run tests with two pretended devices, and expect all of them to pass."""
    done = subprocess.run(
        [sys.executable, "-m", "tests.pretended", "--tb=short", *tests],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=LIMIT_S,
        check=False,
    )
    assert done.returncode == 0, done.stdout[-6000:] + done.stderr[-2000:]


def test_the_pretended_accelerator() -> None:
    passes("tests/pretended/test_device.py")


@pytest.mark.full
def test_golden_problems_with_captured_shards() -> None:
    passes("tests/pretended/test_captured.py")


@pytest.mark.full
def test_what_the_pretended_accelerator_counts() -> None:
    passes("tests/pretended/test_costs.py")


def test_a_part_of_what_is_tested_on_a_gpu() -> None:
    passes(*USUAL)


@pytest.mark.full
@pytest.mark.parametrize("module", MODULES)
def test_what_is_tested_on_a_gpu(module: str) -> None:
    if module == "test_start.py" and missing(["typer"]):
        pytest.skip("needs the command line")
    passes(f"tests/gpu/{module}")


@pytest.mark.full
def test_what_processes_of_a_card_each_ask_of_it(tmp_path: Path) -> None:
    """At most a launch for each parameter, no waits, and most of a gradient leaves early."""
    output = tmp_path / "rows.json"
    options = ["--workloads", "resnet18", "--devices", "2", "3", "--output", str(output)]
    command = [sys.executable, str(ROOT / "benchmarks" / "counts.py"), *options]
    subprocess.run(command, check=True, timeout=LIMIT_S)
    for row in json.loads(output.read_text(encoding="utf-8")):
        assert row["launches"] - row["own_launches"] <= row["parameters"], row
        assert row["waits"] == 0
        assert row["early"] >= 0.8 * row["gradients"], row
        assert row["largest"] <= 128


@pytest.mark.full
@pytest.mark.parametrize(
    ("devices", "shards", "placement"),
    [
        *((1, 2, "replicate"), (2, 4, "replicate"), (3, 6, "replicate"), (3, 8, "replicate")),
        *((2, 4, "replicate:state"), (3, 6, "replicate:state")),
        *((1, 1, "replicate"), (3, 3, "replicate")),
        *(
            (1, 2, "partition"),
            (2, 2, "partition"),
            (2, 8, "partition"),
            (3, 6, "partition"),
            (4, 4, "partition"),
        ),
        *((1, 2, "offload"), (2, 4, "offload"), (3, 8, "offload"), (4, 4, "offload")),
    ],
)
def test_the_plan_tells_what_a_device_takes(devices: int, shards: int, placement: str) -> None:
    """Which holds parameters, gradients and the optimizer's state; a processor has other rules."""
    layer = (peak_bytes.WIDTH + 1) * peak_bytes.WIDTH * 4
    whole = peak_bytes.LAYERS * layer
    sizes = Footprint(
        parameters=whole,
        other=0,
        gradients=whole,
        state=2 * whole,
        scratch=whole,
        stage_gradients=[layer],
        stage_values=[layer],
        sent=layer,
        shards=shards,
    )
    named = ",".join(f"pretend:{number}" for number in range(devices))
    run = [sys.executable, "-m", "onefold", "run", "--devices", named, "--placement", placement]
    done = subprocess.run(
        [*run, str(ROOT / "tests" / "scripts" / "peak_bytes.py"), str(shards)],
        env=build.environment(devices),
        capture_output=True,
        text=True,
        timeout=LIMIT_S,
        check=True,
    )
    planned = implementation_of(placement).estimate(sizes, devices, together=False)[placement]
    assert int(float(done.stdout)) == pytest.approx(planned, rel=0.05)
