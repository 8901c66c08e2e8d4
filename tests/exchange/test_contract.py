"""Each exchange keeps the contract of the interface."""

from __future__ import annotations

import pytest

import onefold
from onefold.exchange.local import local_exchange
from tests.exchange.contract import check_exchange, check_launched, roster, start, storage


@pytest.mark.parametrize("staged", [False, True])
@pytest.mark.parametrize("devices", [1, 2, 3, 7])
def test_devices_of_one_process(devices: int, staged: bool) -> None:
    sizes = storage(devices, staged=staged)
    begun = start(0, sizes)
    exchange = local_exchange(sizes, begun, roster(sizes))
    check_exchange(exchange, sizes, begun, range(devices))


@pytest.mark.processes
@pytest.mark.parametrize("devices", [2, 3, 5])
def test_devices_of_several_processes(devices: int) -> None:
    kinds = ["shared", "shared, in stages", "collective", "collective, in stages"]
    assert onefold.launch(check_launched, devices=f"cpu:{devices}", args=(kinds,)) == kinds
