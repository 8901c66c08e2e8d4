"""The first cases of the fuzzer; ``python -m tests.fuzz`` runs as many others as asked for."""

from __future__ import annotations

import logging
from collections.abc import Iterator

import pytest

from tests.fuzz.campaign import settle, verdicts
from tests.fuzz.case import BLOCK_OF_SEEDS, draw, exchange_of
from tests.fuzz.plainloop import draw_plain, wrong_in

_CHUNK = 55
_IN_ONE_PROCESS = [seed for seed in range(BLOCK_OF_SEEDS) if exchange_of(seed) == "local"]


FULL = pytest.mark.full


@pytest.fixture(autouse=True)
def _log_as_before() -> Iterator[None]:
    """The cases are run with warnings of onefold switched off."""
    log = logging.getLogger("onefold")
    before = log.level
    yield
    log.setLevel(before)


def wrong(seeds: list[int]) -> dict[int, list[str]]:
    """What is wrong with which case."""
    found = verdicts([draw(seed) for seed in seeds])
    return {verdict.case.seed: verdict.wrong for verdict in found if verdict.wrong}


@pytest.mark.filterwarnings("ignore::UserWarning:torch")
@pytest.mark.parametrize(
    "first",
    [_IN_ONE_PROCESS[0], *(pytest.param(n, marks=FULL) for n in _IN_ONE_PROCESS[_CHUNK::_CHUNK])],
)
def test_random_runs_in_one_process(first: int) -> None:
    chosen = [seed for seed in _IN_ONE_PROCESS if first <= seed < first + _CHUNK]
    assert wrong(chosen) == {}


@pytest.mark.parametrize("first", [0, *(pytest.param(n, marks=FULL) for n in (30, 60, 90))])
def test_random_runs_beside_plain_loops(first: int) -> None:
    settle()
    said = {seed: wrong_in(draw_plain(seed)) for seed in range(first, first + 30)}
    assert {seed: text for seed, text in said.items() if text} == {}


@pytest.mark.full
@pytest.mark.processes
@pytest.mark.filterwarnings("ignore::UserWarning:torch")
@pytest.mark.parametrize("exchange", ["shared", "collective"])
def test_random_runs_in_several_processes(exchange: str) -> None:
    chosen = [seed for seed in range(BLOCK_OF_SEEDS) if exchange_of(seed) == exchange]
    assert wrong(chosen) == {}
