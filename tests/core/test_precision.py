"""What each precision stands for, and the scale of float16 losses."""

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from onefold.core.settings import LossScale, Precision


def test_other_names_are_refused() -> None:
    for name in ("", "float16", "fp16-", "BF16"):
        with pytest.raises(ValueError, match='expected precision to be one of "fp32", "bf16"'):
            Precision(name)  # type: ignore[arg-type]


def test_a_scale_doubles_after_two_thousand_good_steps_and_an_overflow_halves_it() -> None:
    scale = LossScale()
    for _ in range(1999):
        scale = scale.after(overflow=False)
        assert scale.value == 2.0**16
    assert scale.after(overflow=False) == LossScale(2.0**17, 0)
    assert scale.after(overflow=True) == LossScale(2.0**15, 0)


@given(st.lists(st.booleans(), max_size=60), st.integers(0, 32))
def test_a_scale_is_a_power_of_two(overflows: list[bool], first: int) -> None:
    scale = LossScale(2.0**first, 1990)
    for overflow in overflows:
        before, scale = scale, scale.after(overflow=overflow)
        assert math.frexp(scale.value)[0] == 0.5
        assert 1.0 <= scale.value <= 2.0**32
        assert before.can_shrink == (before.value > 1.0)
        assert not overflow or scale == LossScale(max(before.value / 2, 1.0))
