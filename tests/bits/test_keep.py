"""What a device keeps of a model is no part of the result: the bits are those of one that keeps
all of it."""

from __future__ import annotations

import functools

import pytest

import onefold
from onefold.core.options import KeepName, RunOptions
from onefold.core.world import World
from tests.bits import cases, large, test_bits
from tests.bits.large import CASES

pytestmark = pytest.mark.xdist_group("bits")

KEEPS: tuple[KeepName, ...] = ("span",)


@functools.cache
def reference(case: large.Case) -> tuple[str, str]:
    """On one device that keeps everything."""
    return large.run(case, ["cpu"])


@pytest.fixture
def alone(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """A process that nobody launched, whose devices keep what the test says."""
    world = World(options=RunOptions(keep=request.param))
    monkeypatch.setattr("onefold.trainer.current_world", lambda: world)


def differing(found: list[tuple[str, str]]) -> list[large.Case]:
    pairs = zip(CASES, found, strict=True)
    return [case for case, result in pairs if result != reference(case.reference)]


def test_the_reference_is_no_special_case() -> None:
    """Different cases have different bits, or the comparisons below would show nothing."""
    # Layers that are computed once more in backward are a matter of memory.
    different = {case.reference for case in CASES if case.model != "checkpoints"}
    assert len({reference(case.reference) for case in CASES}) == len(different)


@pytest.mark.parametrize("alone", KEEPS, indirect=True)
@pytest.mark.parametrize("devices", [1, 2, 3, 4])
@pytest.mark.usefixtures("alone")
def test_devices_of_one_process(devices: int, monkeypatch: pytest.MonkeyPatch) -> None:
    found = [large.run(case, ["cpu"] * devices) for case in CASES]
    monkeypatch.undo()
    assert differing(found) == []


@pytest.mark.processes
@pytest.mark.timeout(300)
@pytest.mark.parametrize("keep", KEEPS)
@pytest.mark.parametrize(
    ("exchange", "devices"),
    [("shared", 2), ("shared", 3), ("shared", 4), ("collective", 2), ("collective", 3)],
)
def test_devices_of_several_processes(exchange: str, devices: int, keep: KeepName) -> None:
    found = onefold.launch(
        large.run_all,
        devices=f"cpu:{devices}",
        args=(CASES,),
        keep=keep,
        exchange=exchange,  # type: ignore[arg-type]
        timeout_s=60,
    )
    assert differing(found) == []


@pytest.mark.processes
@pytest.mark.timeout(300)
@pytest.mark.parametrize("keep", KEEPS)
@pytest.mark.parametrize(("exchange", "devices"), [("shared", 3), ("collective", 2)])
def test_all_else_that_a_run_can_be(exchange: str, devices: int, keep: KeepName) -> None:
    """The runs of test_bits: other models, precisions, averages, losses of the whole batch."""
    chosen = test_bits.turns(devices)
    found = onefold.launch(
        cases.run_all,
        devices=f"cpu:{devices}",
        args=(chosen,),
        keep=keep,
        exchange=exchange,  # type: ignore[arg-type]
        timeout_s=60,
    )
    pairs = zip(chosen, found, strict=True)
    assert [c for c, result in pairs if result != test_bits.reference(c.reference)] == []
