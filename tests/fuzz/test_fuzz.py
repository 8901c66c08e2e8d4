"""The first cases of the fuzzer; ``python -m tests.fuzz`` runs as many others as asked for."""

import logging
from collections.abc import Iterator

import pytest

from tests.fuzz.judge import verdicts

FULL = pytest.mark.full


@pytest.fixture(autouse=True)
def _log_as_before() -> Iterator[None]:
    """The cases are run with warnings of onefold switched off."""
    log = logging.getLogger("onefold")
    before = log.level
    yield
    log.setLevel(before)


@pytest.mark.filterwarnings("ignore::UserWarning:torch")
@pytest.mark.parametrize(
    ("plain", "first", "count"),
    [
        (False, 0, 10),
        (True, 0, 20),
        pytest.param(False, 10, 10, marks=FULL),
        pytest.param(True, 20, 20, marks=FULL),
        *(pytest.param(False, first, 50, marks=FULL) for first in range(20, 270, 50)),
        *(pytest.param(True, first, 80, marks=FULL) for first in (40, 120)),
    ],
)
def test_random_runs(plain: bool, first: int, count: int) -> None:
    found = verdicts(range(first, first + count), None, plain)
    assert {each.case.seed: each.wrong for each in found if each.wrong} == {}
