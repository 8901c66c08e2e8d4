"""What devices state first, and how differences are put into words."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from onefold.core.head import Call, StepHead, differing, read_said
from onefold.errors import DisagreementError
from tests.tables import for_each

HEAD = StepHead(call=Call.STEP, step=7, samples=64, plan=5)
NUMBERS = st.integers(-(2**63), 2**63 - 1)


def test_devices_that_agree_are_told_what_may_differ() -> None:
    for devices in (1, 2, 5):
        said = read_said([HEAD.word()] * devices)
        assert (said.changed, bool(said.stop)) == ((0,) * devices, False)
    said = read_said([HEAD.word(), HEAD.word(changed=3), HEAD.word(stop=True)])
    assert (said.changed, bool(said.stop)) == ((0, 3, 0), True)


@for_each("field", StepHead._fields)
def test_every_field_that_differs_is_an_error_that_names_the_device(field: str) -> None:
    other = HEAD._replace(**{field: Call.SAVE if field == "call" else 3})
    base = HEAD._replace(outside=2)
    other = other if field == "outside" else other._replace(outside=2)
    words = [base.word(), base.word(), other.word()]
    with pytest.raises(DisagreementError, match=r"device 2"):
        read_said(words)
    found = differing(words)
    assert found is not None
    assert found.field == field


@given(numbers=st.lists(NUMBERS, min_size=15, max_size=15), changed=NUMBERS, stop=st.booleans())
def test_any_numbers_travel(numbers: list[int], changed: int, stop: bool) -> None:
    word = StepHead(*numbers).word(changed=changed, stop=stop)
    said = read_said([word, word])
    assert said.changed == (changed, changed)
    assert said.stop is stop
