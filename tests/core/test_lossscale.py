"""The scale of float16 losses: powers of two, halved by an overflow, doubled when long good."""

from __future__ import annotations

import math

from hypothesis import given
from hypothesis import strategies as st

from onefold.core.precision import LossScale


def test_it_doubles_after_two_thousand_good_steps() -> None:
    scale = LossScale()
    for _ in range(1999):
        scale = scale.after(overflow=False)
        assert scale.value == 2.0**16
    assert scale.after(overflow=False) == LossScale(2.0**17, 0)


def test_an_overflow_halves_it_and_begins_to_count_anew() -> None:
    assert LossScale(1024.0, 1500).after(overflow=True) == LossScale(512.0, 0)


def test_it_ends_where_it_could_not_be_the_cause() -> None:
    scale = LossScale(2.0)
    assert scale.can_shrink
    scale = scale.after(overflow=True)
    assert scale == LossScale(1.0)
    assert not scale.can_shrink
    assert scale.after(overflow=True) == scale


@given(st.lists(st.booleans(), max_size=60), st.integers(0, 32))
def test_it_is_always_a_power_of_two(overflows: list[bool], first: int) -> None:
    scale = LossScale(2.0**first, 1990)
    for overflow in overflows:
        scale = scale.after(overflow=overflow)
        assert math.frexp(scale.value)[0] == 0.5
        assert 1.0 <= scale.value <= 2.0**32
