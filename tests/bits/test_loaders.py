"""However its batches are made, a run has the same bits on any number of devices."""

from __future__ import annotations

import functools
from pathlib import Path

import pytest

import onefold
from tests.bits.loaders import EPOCHS, KINDS, STEPS_OF_AN_EPOCH, run_part, run_parts

pytestmark = [pytest.mark.processes, pytest.mark.xdist_group("bits")]

STOPS = {kind: STEPS_OF_AN_EPOCH.get(kind, 4) + 2 for kind in KINDS}
"""Two steps into the second epoch."""


@functools.cache
def never_stopped(kind: str) -> tuple[int, str]:
    return run_part(kind, 0, Path("nowhere"), None, devices=["cpu"])


@pytest.mark.parametrize("kind", KINDS)
def test_the_passes_are_of_this_length(kind: str) -> None:
    assert never_stopped(kind)[0] == EPOCHS * STEPS_OF_AN_EPOCH.get(kind, 4)


@pytest.mark.parametrize("devices", [2, 3])
@pytest.mark.parametrize("kind", KINDS)
def test_several_devices_of_one_process_have_the_bits_of_one(kind: str, devices: int) -> None:
    plan = (3, 1) if devices == 2 else (1, 0, 3)
    found = run_part(kind, 0, Path("nowhere"), None, plan, ["cpu"] * devices)
    assert found == never_stopped(kind)


@pytest.mark.parametrize("kind", [kind for kind in KINDS if kind != "rule"])
def test_workers_read_the_same(kind: str) -> None:
    assert run_part(kind, 2, Path("nowhere"), None, (1, 3), ["cpu"] * 2) == never_stopped(kind)


def launched(
    devices: int, workers: int, folder: Path, stops: dict[str, int] | None, plan: tuple[int, ...]
) -> dict[str, tuple[int, str]]:
    kinds = [(kind, 0 if kind == "rule" else workers) for kind in KINDS]
    found = onefold.launch(
        run_parts, devices=f"cpu:{devices}", args=(kinds, folder, stops, plan), timeout_s=300
    )
    return dict(zip(KINDS, found, strict=True))


def test_a_stopped_run_goes_on_with_the_same_bits(tmp_path: Path) -> None:
    """In the middle of the second epoch from three devices to two, a step later to one."""
    first = launched(3, 0, tmp_path, STOPS, (1, 1, 2))
    assert {kind: steps for kind, (steps, _) in first.items()} == STOPS
    later = {kind: stop + 1 for kind, stop in STOPS.items()}
    second = launched(2, 1, tmp_path, later, (3, 1))
    assert {kind: steps for kind, (steps, _) in second.items()} == later
    last = {kind: run_part(kind, 0, tmp_path / kind, None, devices=["cpu"]) for kind in KINDS}
    assert last == {kind: never_stopped(kind) for kind in KINDS}
