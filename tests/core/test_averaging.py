"""Which average is kept, and how much weight each value has in it."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from onefold.update.averages import AverageRule


@given(st.lists(st.floats(-1e3, 1e3), min_size=1, max_size=50))
def test_a_mean_has_all_values_alike_and_not_the_first_one(values: list[float]) -> None:
    average = 1e9
    for update, value in enumerate(values, 1):
        kept = AverageRule(None).kept(update)
        average = kept * average + (1 - kept) * value
    assert average == pytest.approx(sum(values) / len(values), abs=1e-9)


def test_what_is_no_average_is_refused() -> None:
    for choice, words in (
        ({}, r"expected either decay, .* or mean=True .*, got decay=None and mean=False"),
        ({"decay": 0.9, "mean": True}, "got decay=0.9 and mean=True"),
        ({"decay": 1.0}, "expected decay to be at least 0 and less than 1, got 1.0"),
        ({"decay": float("nan")}, "less than 1, got nan"),
        ({"decay": "0.9"}, "expected decay to be a number, got '0.9'"),
        ({"decay": 0.9, "every": 0}, "expected every of at least 1, got 0"),
        ({"mean": 1}, "expected mean to be True or False, got 1"),
    ):
        with pytest.raises((TypeError, ValueError), match=words):
            AverageRule.chosen(**{"decay": None, "mean": False, "every": 1, **choice})
