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
        ("stages", 3),
        ("stages:2", 4),
        ("stages:3", 6),
        *(pytest.param("stages", devices, marks=pytest.mark.full) for devices in (1, 2, 4)),
        *(pytest.param("stages:2", devices, marks=pytest.mark.full) for devices in (2, 6)),
        pytest.param("stages:3", 9, marks=pytest.mark.full),
    ],
)
def test_devices_of_one_process(keep: str, devices: int, monkeypatch: pytest.MonkeyPatch) -> None:
    make_lines(monkeypatch, keep)
    found = [lined.run(case, ["cpu"] * devices) for case in CASES]
    monkeypatch.undo()
    assert differing(found) == []


@pytest.mark.processes
@pytest.mark.parametrize(
    ("exchange", "keep", "devices"),
    [
        ("shared", "stages", 3),
        ("shared", "stages:2", 4),
        ("collective", "stages", 2),
        *(pytest.param("shared", "stages", devices, marks=pytest.mark.full) for devices in (2, 4)),
        pytest.param("shared", "stages:2", 6, marks=pytest.mark.full),
        pytest.param("collective", "stages", 3, marks=pytest.mark.full),
        *(
            pytest.param("collective", "stages:2", devices, marks=pytest.mark.full)
            for devices in (4, 6)
        ),
    ],
)
def test_devices_of_several_processes(exchange: str, keep: str, devices: int) -> None:
    found = onefold.launch(
        lined.run_all,
        devices=f"cpu:{devices}",
        args=(CASES,),
        keep=keep,
        exchange=exchange,  # type: ignore[arg-type]
        timeout_s=300,
    )
    assert differing(found) == []
