"""``onefold verify`` says that the bits agree when they do, and finds what makes them differ."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

from onefold.cli.verify import Difference, first_difference

SCRIPT = Path(__file__).parent.parent / "scripts" / "verified.py"


def verify(fault: str, devices: str = "1,2,3", *options: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "onefold", "verify", "--devices", devices, "--steps", "3"]
    return subprocess.run(
        [*command, *options, str(SCRIPT), fault],
        capture_output=True,
        text=True,
        check=False,
        timeout=150,
        env={"PATH": "/usr/bin:/bin", "COLUMNS": "200"},
    )


def line(step: int, **digests: str) -> dict[str, object]:
    return {"step": step, "digests": digests}


def test_the_first_difference_is_found() -> None:
    reference = [line(0, a="1", b="2"), line(1, a="3", b="4"), line(2, a="5", b="6")]
    other = [line(0, a="1", b="2"), line(1, a="3", b="x"), line(2, a="y", b="z")]
    other[1]["differences"] = {"b": 0.25}
    assert first_difference(reference, other) == Difference(1, "b", 1, 0.25)
    assert first_difference(reference, reference) is None


@pytest.mark.processes
@pytest.mark.timeout(200)
def test_a_sound_script_is_said_to_agree() -> None:
    done = verify("none")
    assert done.returncode == 0, done.stderr
    assert "The bits agree after each of 3 steps." in done.stdout
    assert done.stdout.count("the same") == 2


@pytest.mark.processes
@pytest.mark.timeout(200)
@pytest.mark.parametrize(
    ("fault", "devices", "hint"),
    [
        ("unseeded", "1,2", "a generator that is not seeded"),
        ("rank", "1,2", "reads the rank or the number of devices"),
    ],
)
def test_a_fault_is_found(fault: str, devices: str, hint: str) -> None:
    done = verify(fault, devices)
    assert done.returncode == 1, done.stderr
    said = " ".join(done.stdout.split())
    found = r"The bits differ, first after step 1, in first\.weight: largest difference \d\S*;"
    assert re.search(found, said), said
    assert hint in said


@pytest.mark.processes
@pytest.mark.timeout(200)
def test_an_unseeded_start_is_found_before_the_first_step() -> None:
    done = verify("start", "1,2")
    assert done.returncode == 1, done.stderr
    said = " ".join(done.stdout.split())
    assert "first after step 0, in first.weight" in said
    assert "torch.manual_seed(0) before the model is built" in said


@pytest.mark.processes
def test_a_script_that_fails_is_no_verdict() -> None:
    done = verify("raise", "1,2")
    assert done.returncode == 2
    assert "RuntimeError: no run at all" in done.stderr


@pytest.mark.parametrize("devices", ["1", "", "1,x", "0,1"])
def test_counts_that_cannot_be_read_are_refused(devices: str) -> None:
    done = verify("none", devices)
    assert done.returncode == 2
    assert "expected two or more device counts" in done.stderr
