"""The promise: the same bits on any number of devices, by any exchange and any plan."""

from __future__ import annotations

import functools

import pytest

import onefold
from tests.bits.cases import Case, complete, covering, left_out, run, run_all
from tests.capabilities import NO_LSTM

EXCHANGES = ("local", "shared", "collective")
COUNTS = {"local": (3, 4), "shared": (2, 3), "collective": (2, 3)}
"""Device counts by exchange. An odd and an even one see all the covering cases together."""


# One test worker has them all: each of them needs the runs on one device that others need too.
pytestmark = pytest.mark.xdist_group("bits")


@functools.cache
def reference(case: Case) -> tuple[str, str]:
    """On one device."""
    return run(case, ["cpu"])


def differing(cases: list[Case], exchange: str, devices: int) -> list[Case]:
    """The cases whose bits are not those of one device."""
    if exchange == "local":
        results = [run(case, ["cpu"] * devices) for case in cases]
    else:
        results = onefold.launch(
            run_all, devices=f"cpu:{devices}", args=(cases,), exchange=exchange, timeout_s=300
        )
    pairs = zip(cases, results, strict=True)
    return [case for case, result in pairs if result != reference(case.reference)]


def turns(devices: int) -> list[Case]:
    """The covering cases, dealt out so that an odd and an even number of devices see all of them,
    with a light one of every model for each count."""
    cases = covering()
    heavy = [c for c in cases if c.model in ("cnn", "resnet18")]
    light = [c for c in cases if c not in heavy]
    return light[devices % 2 :: 2] + heavy[devices % 2 :: 2]


@pytest.mark.processes
@pytest.mark.parametrize(
    ("exchange", "devices"),
    [(exchange, devices) for exchange, counts in COUNTS.items() for devices in counts],
)
def test_the_bits_do_not_depend_on_the_devices(exchange: str, devices: int) -> None:
    assert differing(turns(devices), exchange, devices) == []


def test_every_case_is_computed() -> None:
    """Skipped, by name, where the processor has no kernels for some."""
    if left_out():
        pytest.skip(f"{NO_LSTM}: {', '.join(map(str, left_out()))}")


@pytest.mark.full
@pytest.mark.processes
@pytest.mark.timeout(7200)
@pytest.mark.parametrize("devices", [1, 2, 3, 4])
@pytest.mark.parametrize("exchange", EXCHANGES)
def test_everything_with_everything(exchange: str, devices: int) -> None:
    assert differing(complete(), exchange, devices) == []


def test_another_seed_or_number_of_shards_gives_other_bits() -> None:
    bits = {reference(Case("lenet", "sgd", shards))[0] for shards in (2, 4, 7)}
    assert len(bits) == 3
