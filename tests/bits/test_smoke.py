"""Real processes have the golden bits: every exchange with every placement, many cases a launch."""

import functools
from collections.abc import Sequence
from typing import Any

import pytest

import onefold
from onefold.system import file_memory
from onefold.testing import simulate
from tests import golden
from tests.bits import adapted
from tests.tables import for_each, some

CASES = (
    "mixed-adamw-4 shards-microbatch 1",
    "option-gather",
    "loader-stream",
    "line-text-adamw",
)
IN_PIPELINES = tuple(name for name in CASES if name.startswith("line"))


def computed(names: Sequence[str]) -> list[list[str]]:
    """What a device has of some golden problems, one after the other."""
    known = {problem.name: problem for problem in golden.problems()}
    least = file_memory.LEAST_BYTES
    file_memory.LEAST_BYTES = 1  # the models are small, and the home is to have all of them
    try:
        return [[str(value) for value in known[name].compute()] for name in names]
    finally:
        file_memory.LEAST_BYTES = least


@functools.cache
def reference(names: tuple[str, ...]) -> list[list[str]]:
    """On one simulated device, which keeps everything."""
    (found,) = simulate(computed, 1, args=(names,))
    return found


def check(exchange: str, placement: str, devices: int, names: tuple[str, ...]) -> None:
    way: dict[str, Any] = {"placement": placement, "exchange": exchange}
    way |= {"devices": f"cpu:{devices}", "timeout_s": 300}
    found = onefold.launch(computed, args=(names,), **way)
    pairs = zip(names, found, reference(names), strict=True)
    assert [name for name, one, other in pairs if one != other] == []


@pytest.mark.processes
@pytest.mark.xdist_group("smoke")
@pytest.mark.parametrize(
    ("exchange", "placement"),
    some(
        [
            *(("shared", "replicate"), ("collective", "replicate")),
            *(("collective", "partition"), ("shared", "partition")),
            *(("shared", "offload"), ("collective", "offload")),
            *(("collective", "pipeline"), ("shared", "pipeline")),
        ],
        3,
    ),
)
def test_processes_have_the_bits_of_simulated_devices(exchange: str, placement: str) -> None:
    names = IN_PIPELINES if placement == "pipeline" else CASES
    check(exchange, placement, 3 if placement in ("replicate", "pipeline") else 2, names)


PARTITIONED = [("partition", 2), ("partition", 3), ("pipeline", 3), ("pipeline:2", 4)]


@for_each(("placement", "devices"), PARTITIONED)
def test_between_steps_a_device_has_its_part_of_frozen_parameters_alone(
    placement: str, devices: int
) -> None:
    for kept, total, here in simulate(
        adapted.at_hand, devices, placement=placement, exchange="collective"
    ):
        assert here == ["scale", "tokens.weight"]  # which lie in no stage, and in two
        assert 0.3 * total / devices < kept < 1.8 * total / devices
