"""Each exchange keeps the contract of the interface, and fails alike in processes and simulated."""

import json
from pathlib import Path
from typing import Any

import pytest

import onefold
from onefold.errors import RunFailed
from onefold.exchange.exchange import exchange_over
from onefold.exchange.transport import LocalTransport
from onefold.system.allocator import DEFAULT_ALLOCATOR
from onefold.system.file_memory import MmapAllocator
from onefold.testing import Fault, outcomes, simulate
from tests.exchange.contract import (
    CALLS,
    CPU,
    EXCHANGES,
    assignment,
    check_exchange,
    check_launched,
    fail_at,
    fail_in_turn,
    met,
    start,
    storage,
)
from tests.tables import for_each, some

WAYS = ["", ", in stages", ", in stages, on a disk"]
KINDS = [kind + way for kind in EXCHANGES for way in WAYS]


@for_each(("devices", "way"), [(1, WAYS[2]), (2, WAYS[0]), (3, WAYS[1]), (7, WAYS[2])])
def test_devices_of_one_process(devices: int, way: str, tmp_path: Path) -> None:
    sizes = storage(devices, staged="in stages" in way)
    begun = start(0, sizes)
    home = MmapAllocator(tmp_path) if "on a disk" in way else DEFAULT_ALLOCATOR
    exchange = exchange_over(LocalTransport(CPU, home), sizes, begun, assignment(sizes))
    check_exchange(exchange, sizes, begun, range(devices))


@for_each(("number", "kind"), some(enumerate(KINDS[:-1]), 3))
def test_simulated_devices(number: int, kind: str) -> None:
    devices = 2 + number % 2
    assert simulate(check_launched, devices, seed=number, args=([kind],)) == [[kind]] * devices


@pytest.mark.processes
@pytest.mark.full
@pytest.mark.parametrize("devices", [2, 3, 5])
def test_devices_of_several_processes(devices: int) -> None:
    assert onefold.launch(check_launched, devices=f"cpu:{devices}", args=(KINDS,)) == KINDS


# The error of the other device, whose class and number are those of the fault.
ENDS = {
    **dict.fromkeys(("kill", "stop", "cut", "leaves"), "PeerLost"),
    "fails": "PeerFailed",
    "disagrees": "DisagreementError",
}
NAMELESS = {("collective", "kill"), ("collective", "cut")}
"""A backend says that a connection has ended, and not which."""


def expected(kind: str, device: int, fault: str) -> tuple[str, int | None]:
    name = ENDS[fault]
    if name == "DisagreementError":
        return name, None
    return name, -1 if (kind, fault) in NAMELESS else device


@for_each("kind", EXCHANGES)
def test_a_fault_ends_the_other_device_alike_at_every_call(kind: str) -> None:
    faults: list[Fault]
    for call in CALLS:
        for device in {"gather_to_lead": [1], "hand out": [0]}.get(call, [0, 1]):
            ways = (kind, call, device)
            calls = outcomes(fail_at, 2, args=(*ways, "fails"))[device].calls
            for seed, fault in enumerate(ENDS):
                happens, faults = fault, []
                if fault in ("kill", "stop", "cut"):
                    kill: Any = fault
                    happens, faults = "nothing", [Fault(device=device, call=calls + 1, kind=kill)]
                found = outcomes(fail_at, 2, seed=seed, args=(*ways, happens), faults=faults)
                other = found[1 - device].error
                assert met(other) == expected(kind, device, fault), (call, device, fault, other)


QUICK = [("agree", 1, "fails"), ("collect", 1, "cut"), ("share", 1, "disagrees")]
LAST = [
    ("agree", 1, "kill"),
    ("gather_to_lead", 1, "stop"),
    ("collect", 0, "kill"),
    ("share", 1, "leaves"),
]


@pytest.mark.processes
@pytest.mark.parametrize(
    ("kind", "last"),
    [
        pytest.param(kind, last, marks=[pytest.mark.full] if last != LAST[0] else [])
        for kind in EXCHANGES
        for last in LAST
    ],
)
def test_processes_end_as_simulated(kind: str, last: tuple[str, int, str], tmp_path: Path) -> None:
    rows = [*QUICK, last]
    try:
        onefold.launch(fail_in_turn, devices="cpu:2", args=(kind, rows, str(tmp_path)))
    except RunFailed:
        assert last[2] in ("kill", "stop")
    found = [json.loads(line) for line in (tmp_path / str(1 - last[1])).read_text().splitlines()]
    # A device sees its own error, unless it has none.
    wanted = [expected(kind, device, fault) for _, device, fault in rows]
    if last[1] == 0:
        wanted[0], wanted[2] = ("ArithmeticError", None), ("DisagreementError", None)
        wanted[1] = ("PeerLost", -1 if kind == "collective" else 0)
    assert [tuple(each) for each in found] == wanted
