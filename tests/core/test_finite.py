"""What is found among values that ought to be finite, whatever their type."""

from __future__ import annotations

import math

import torch
from hypothesis import given
from hypothesis import strategies as st

from onefold.core.finite import all_finite, first_not_finite, names_with_nan
from tests.tables import for_each

FLOATS = [torch.float64, torch.float32, torch.float16, torch.bfloat16, torch.float8_e5m2]
WHOLE = [torch.int64, torch.uint8, torch.bool, torch.uint64]
BAD = [math.nan, math.inf, -math.inf]


@for_each("place", [0, 1, 999])
@for_each("value", BAD)
@for_each("dtype", FLOATS)
def test_one_bad_value_is_found_wherever_it_is(
    dtype: torch.dtype, value: float, place: int
) -> None:
    values = torch.ones(1000)
    values[place] = value
    assert not all_finite(values.to(dtype))


@for_each("dtype", FLOATS)
def test_the_largest_values_are_finite_though_their_sum_is_not(dtype: torch.dtype) -> None:
    largest = torch.finfo(dtype).max
    assert all_finite(torch.full((1000,), largest, dtype=torch.float64).to(dtype))


def test_infinities_that_cancel_are_found() -> None:
    assert not all_finite(torch.tensor([math.inf, -math.inf]))


@for_each("dtype", [torch.complex64, torch.complex128])
@for_each("value", [complex(0, math.nan), complex(math.inf, 0), complex(0, -math.inf)])
def test_either_part_of_a_complex_number_counts(dtype: torch.dtype, value: complex) -> None:
    assert all_finite(torch.ones(3, dtype=dtype))
    assert not all_finite(torch.tensor([1, value], dtype=dtype))


@for_each("dtype", [*FLOATS, *WHOLE, torch.complex64])
def test_nothing_is_finite(dtype: torch.dtype) -> None:
    assert all_finite(torch.empty((0, 3), dtype=dtype))


@for_each("dtype", WHOLE)
def test_whole_numbers_always_are(dtype: torch.dtype) -> None:
    assert all_finite(torch.ones(5).to(dtype))


@for_each(
    "view", [lambda t: t.t(), lambda t: t[::2], lambda t: t[1].expand(4, 3), lambda t: t[0, 0]]
)
def test_views_are_looked_at_by_what_they_show(view: object) -> None:
    values = torch.ones(4, 3)
    assert all_finite(view(values))  # type: ignore[operator]
    values[1, 0] = values[0, 0] = values[2, 1] = math.nan
    assert not all_finite(view(values))  # type: ignore[operator]
    assert all_finite(values[3])


def test_parameters_are_looked_at_without_a_graph() -> None:
    parameter = torch.nn.Parameter(torch.tensor([3e38, 3e38]))
    assert all_finite(parameter)
    assert names_with_nan({"it": parameter}) == set()


@given(values=st.lists(st.floats(width=32), max_size=20))
def test_it_is_what_python_says(values: list[float]) -> None:
    assert all_finite(torch.tensor(values)) is all(map(math.isfinite, values))
    found = names_with_nan({"it": torch.tensor(values)})
    assert found == ({"it"} if any(map(math.isnan, values)) else set())


def named(**values: float) -> tuple[list[torch.Tensor], dict[str, torch.Tensor]]:
    """Values by name, in one section."""
    section = torch.tensor(list(values.values()))
    return [section], dict(zip(values, section.unbind(), strict=True))


def test_the_first_one_that_is_not_finite_is_named() -> None:
    assert first_not_finite(*named(a=1.0, b=math.inf, c=math.nan)) == "b"
    assert first_not_finite(*named(a=1.0, b=3e38, c=3e38)) is None


def test_tensors_are_looked_at_where_a_section_is_not_finite() -> None:
    """Padding between them may hold anything, and belongs to nobody."""
    sections, tensors = named(a=1.0)
    assert first_not_finite([*sections, torch.tensor([math.nan])], tensors) is None
    assert first_not_finite(sections, {"not looked at": torch.tensor(math.nan)}) is None


def test_any_section_may_be_the_one() -> None:
    (first,), one = named(a=1.0)
    (second,), two = named(b=math.nan)
    assert first_not_finite([first, second], {**one, **two}) == "b"


@for_each("dtype", FLOATS)
def test_infinities_are_no_nan(dtype: torch.dtype) -> None:
    tensors = {
        "mask": torch.tensor([1.0, -math.inf]).to(dtype),
        "spoilt": torch.tensor([math.inf, math.nan]).to(dtype),
        "fine": torch.ones(2).to(dtype),
        "count": torch.ones(2, dtype=torch.int64),
        "none": torch.ones(0, dtype=dtype),
    }
    assert names_with_nan(tensors) == {"spoilt"}
