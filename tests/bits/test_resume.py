"""A run that is stopped and goes on elsewhere has the bits of the run that never stopped."""

from __future__ import annotations

import functools
import random
from itertools import product
from pathlib import Path

import pytest

import onefold
from tests.bits.resumed import STEPS_OF_AN_EPOCH, Case, run_part

EXCHANGES = ("local", "shared", "collective")
COVERING = [
    ("local", Case(seed=0, drop_last=False, workers=2)),
    ("shared", Case(seed=1, drop_last=True, workers=0)),
    ("collective", Case(seed=2, drop_last=True, workers=2)),
]
COMPLETE = [
    (exchange, Case(seed, drop_last, workers))
    for exchange, seed, drop_last, workers in product(EXCHANGES, (3, 4, 5), (False, True), (0, 2))
]

pytestmark = [pytest.mark.processes, pytest.mark.xdist_group("bits")]


@functools.cache
def never_stopped(case: Case) -> tuple[int, str]:
    return run_part(case, Path("nowhere"), None, ["cpu"])


def part(
    exchange: str, devices: int, case: Case, folder: Path, stop: int | None
) -> tuple[int, str]:
    if exchange == "local":
        return run_part(case, folder, stop, ["cpu"] * devices)
    result: tuple[int, str] = onefold.launch(
        run_part,
        devices=f"cpu:{devices}",
        args=(case, folder, stop),
        exchange=exchange,  # type: ignore[arg-type]
        timeout_s=300,
    )
    return result


def check(exchange: str, case: Case, folder: Path) -> None:
    """In the middle of the second epoch from three devices to one, a little later to two."""
    last = 2 * STEPS_OF_AN_EPOCH + (not case.drop_last)
    first = random.Random(case.seed).randrange(STEPS_OF_AN_EPOCH + 1, last)
    assert part(exchange, 3, case, folder, first)[0] == first
    assert part(exchange, 1, case, folder, first + 1)[0] == first + 1
    assert part(exchange, 2, case, folder, None) == never_stopped(case)


@pytest.mark.parametrize(("exchange", "case"), COVERING)
def test_a_stopped_run_goes_on_with_the_same_bits(
    tmp_path: Path, exchange: str, case: Case
) -> None:
    check(exchange, case, tmp_path / "run")


@pytest.mark.full
@pytest.mark.parametrize(("exchange", "case"), COMPLETE)
def test_with_every_exchange_and_way_of_reading(tmp_path: Path, exchange: str, case: Case) -> None:
    check(exchange, case, tmp_path / "run")
