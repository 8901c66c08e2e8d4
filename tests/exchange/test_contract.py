"""Each exchange keeps the contract of the interface."""

from __future__ import annotations

import pytest

import onefold
from onefold.exchange.base import Exchange
from onefold.exchange.local import LocalExchange, SoloExchange
from tests.exchange.contract import CPU, check_exchange, check_launched, start, storage


@pytest.mark.parametrize("devices", [1, 2, 3, 7])
def test_devices_of_one_process(devices: int) -> None:
    sizes = storage(devices)
    begun = start(0, sizes)
    exchange: Exchange
    if devices == 1:
        exchange = SoloExchange(sizes, begun, CPU)
    else:
        exchange = LocalExchange(sizes, begun, [CPU] * devices)
    check_exchange(exchange, sizes, begun, range(devices))


@pytest.mark.processes
@pytest.mark.parametrize("devices", [2, 3, 5])
def test_devices_of_several_processes(devices: int) -> None:
    kinds = ["shared", "collective"]
    assert onefold.launch(check_launched, devices=f"cpu:{devices}", args=(kinds,)) == kinds
