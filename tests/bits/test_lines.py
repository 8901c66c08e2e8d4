"""A line of devices, each of which computes some stages of every shard, has the bits of one."""

from __future__ import annotations

import functools

import pytest

import onefold
from onefold.core.options import RunOptions
from onefold.core.world import World
from tests.bits import lined
from tests.bits.lined import CASES, Case

pytestmark = pytest.mark.xdist_group("bits")


@functools.cache
def reference(case: Case) -> tuple[str, ...]:
    return lined.run(case, ["cpu"])


def make_lines(monkeypatch: pytest.MonkeyPatch, keep: str) -> None:
    """Have the devices of this process, which nobody launched, be lines."""
    world = World(options=RunOptions(keep=keep))
    monkeypatch.setattr("onefold.trainer.current_world", lambda: world)


def differing(found: list[tuple[str, ...]]) -> list[Case]:
    return [c for c, result in zip(CASES, found, strict=True) if result != reference(c)]


def test_the_reference_is_no_special_case() -> None:
    """Different cases have different bits, or the comparisons below would show nothing."""
    alike = {"checkpoints", "grouped"}  # a matter of memory
    different = [case for case in CASES if case.model not in alike]
    assert len({reference(case) for case in CASES}) == len(different)


@pytest.mark.parametrize(
    ("keep", "devices"),
    [
        *(("stages", devices) for devices in (1, 2, 3, 4)),
        *(("stages:2", devices) for devices in (2, 4, 6)),
        *(("stages:3", devices) for devices in (6, 9)),
    ],
)
def test_devices_of_one_process(keep: str, devices: int, monkeypatch: pytest.MonkeyPatch) -> None:
    make_lines(monkeypatch, keep)
    found = [lined.run(case, ["cpu"] * devices) for case in CASES]
    monkeypatch.undo()
    assert differing(found) == []


@pytest.mark.processes
@pytest.mark.timeout(300)
@pytest.mark.parametrize(
    ("exchange", "keep", "devices"),
    [
        *(("shared", "stages", devices) for devices in (2, 3, 4)),
        *(("shared", "stages:2", devices) for devices in (4, 6)),
        *(("collective", "stages", devices) for devices in (2, 3)),
        *(("collective", "stages:2", devices) for devices in (4, 6)),
    ],
)
def test_devices_of_several_processes(exchange: str, keep: str, devices: int) -> None:
    found = onefold.launch(
        lined.run_all,
        devices=f"cpu:{devices}",
        args=(CASES,),
        keep=keep,
        exchange=exchange,  # type: ignore[arg-type]
        timeout_s=60,
    )
    assert differing(found) == []
