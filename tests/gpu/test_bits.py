"""One, two and three devices of one card: the same bits, for every model of the tests of bits."""

from __future__ import annotations

from functools import cache

from tests.bits.cases import Case, covering, run
from tests.gpu.device import DEVICE, ON_GPU, each

COVERING = covering() if ON_GPU else covering()[:3]
"""The processor has them in `tests.bits`: here a few try these tests themselves."""


@cache
def reference(case: Case) -> tuple[str, str]:
    """On one device."""
    return run(case, [DEVICE])


@each("number", range(len(COVERING)))
def test_the_bits_do_not_depend_on_the_devices_of_a_card(number: int) -> None:
    case = COVERING[number]
    assert run(case, [DEVICE] * (2 + number % 2)) == reference(case.reference), case
