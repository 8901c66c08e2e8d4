"""Each exchange keeps the contract of the interface."""

from __future__ import annotations

from pathlib import Path

import pytest

import onefold
from onefold.exchange.joining import local_exchange
from onefold.system import heap
from onefold.system.heap import ORDINARY, DiskHeap
from onefold.testing import simulate
from tests.exchange.contract import check_exchange, check_launched, roster, start, storage
from tests.tables import for_each


@for_each("how", [(), ("in stages",), ("in stages", "on a disk")], ids=["plain", "stages", "disk"])
@for_each("devices", [1, 2, 3, 7])
def test_devices_of_one_process(
    devices: int, how: tuple[str, ...], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(heap, "_LEAST_BYTES", 1)  # what the contract exchanges is small
    sizes = storage(devices, staged="in stages" in how)
    begun = start(0, sizes)
    home = DiskHeap(tmp_path) if "on a disk" in how else ORDINARY
    exchange = local_exchange(sizes, begun, roster(sizes), home)
    check_exchange(exchange, sizes, begun, range(devices))


WAYS = ["", ", in stages", ", in stages, on a disk"]
KINDS = [kind + way for kind in ("shared", "collective") for way in WAYS]


@for_each(("devices", "seed"), [(2, 0), (3, 1)])
def test_simulated_devices(devices: int, seed: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(heap, "_LEAST_BYTES", 1)
    # A Trainer of the simulation reaches the others in one way alone.
    for kind in KINDS:
        assert simulate(check_launched, devices, seed=seed, args=([kind],)) == [[kind]] * devices


@pytest.mark.processes
@pytest.mark.full
@pytest.mark.parametrize("devices", [2, 3, 5])
def test_devices_of_several_processes(devices: int) -> None:
    assert onefold.launch(check_launched, devices=f"cpu:{devices}", args=(KINDS,)) == KINDS
