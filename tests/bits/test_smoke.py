"""Real processes have the golden bits: every exchange with every placement, many cases a launch."""

from __future__ import annotations

import functools
from collections.abc import Sequence

import pytest

import onefold
from onefold.system import heap
from onefold.testing import simulate
from tests import golden

pytestmark = [pytest.mark.processes, pytest.mark.xdist_group("smoke")]

CASES = (
    "mixed-adamw-4 shards-microbatch 1",
    "option-gather",
    "loader-stream",
    "stages-tied-adamw",
    "line-text-adamw",
)
IN_LINES = tuple(name for name in CASES if name.startswith("line"))


def computed(names: Sequence[str]) -> list[list[str]]:
    """What a device has of some golden problems, one after the other."""
    heap._LEAST_BYTES = 1  # the models are small, and the home is to have all of them
    known = {problem.name: problem for problem in golden.problems()}
    return [[str(value) for value in known[name].compute()] for name in names]


@functools.cache
def reference(names: tuple[str, ...]) -> list[list[str]]:
    """On one simulated device, which keeps everything."""
    least = heap._LEAST_BYTES
    try:
        (found,) = simulate(computed, 1, args=(names,))
    finally:
        heap._LEAST_BYTES = least
    return found  # type: ignore[no-any-return]


@pytest.mark.parametrize("exchange", ["shared", "collective"])
@pytest.mark.parametrize("keep", ["all", "span", "host", "stages"])
def test_processes_have_the_bits_of_simulated_devices(exchange: str, keep: str) -> None:
    names = IN_LINES if keep == "stages" else CASES
    found = onefold.launch(
        computed,
        devices="cpu:3" if keep in ("all", "stages") else "cpu:2",
        args=(names,),
        keep=keep,
        exchange=exchange,  # type: ignore[arg-type]
        timeout_s=300,
    )
    assert found == reference(names)
