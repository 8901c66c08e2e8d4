"""Which calls may be made with tensors that have no values, and which of them can be noted."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch

from onefold.run.calls import can_be_kept, reads_all, takes_a_view, tensors_in
from tests.tables import for_each

T = torch.Tensor
WHOLE = torch.empty(6, 4)
PLACE = torch.tensor(2)


def test_tensors_are_found_wherever_they_are() -> None:
    given = ((WHOLE, [PLACE]), {"a": slice(PLACE, None), "b": 3})
    assert [id(each) for each in tensors_in(given)] == [id(WHOLE), id(PLACE), id(PLACE)]


PLACES: list[tuple[object, bool]] = [
    (2, True),
    (slice(1, 3), True),
    ((slice(None), None, ..., 0), True),
    (True, False),
    (PLACE, False),
    ([0, 1], False),
    (np.int64(2), False),
    (slice(PLACE, None), False),
    ((slice(None), PLACE), False),
]


@for_each(
    ("function", "args", "expected"),
    [
        *((T.__getitem__, (WHOLE, place), expected) for place, expected in PLACES),
        (T.select, (WHOLE, 0, 1), True),
        (T.select, (WHOLE, 0, PLACE), False),
        (torch.narrow, (WHOLE, 0, 0, 2), True),
        (T.reshape, (WHOLE, 24), False),
        (T.view, (WHOLE, 24), True),
    ],
)
def test_views_look_at_nothing(function: Any, args: tuple[object, ...], expected: bool) -> None:
    assert takes_a_view(function, args, {}) == expected


@for_each(
    ("function", "args", "expected"),
    [
        (T.mul, (WHOLE, 2.0), True),
        (T.mul, (WHOLE, WHOLE), False),
        (torch.cat, ([WHOLE, WHOLE],), True),
        (torch.randn_like, (WHOLE,), True),
        (T.to, (WHOLE, torch.bfloat16), True),
        (T.to, (WHOLE, WHOLE), False),
        (torch.arange, (PLACE,), False),
    ],
)
def test_what_is_made_of_one_tensor(
    function: Any, args: tuple[object, ...], expected: bool
) -> None:
    assert reads_all(function, args, {}) == expected


@for_each(
    ("value", "expected"),
    [
        ((1, 2.0, "x", None, torch.float32, WHOLE), True),
        ({"a": [1, (2, 3)]}, True),
        (np.ones(3), False),
        (slice(1, None), True),
        (slice(PLACE, None), False),
        (torch.Generator(), True),
        (object(), False),
    ],
)
def test_what_may_change_is_not_kept(value: object, expected: bool) -> None:
    assert can_be_kept(value) == expected
