"""What is found among values that ought to be finite, whatever their type."""

import math

import torch

from onefold.core.flat import all_finite, names_with_nan
from tests.tables import for_each

FLOATS = [torch.float64, torch.float32, torch.float16, torch.bfloat16, torch.float8_e5m2]
WHOLE = [torch.int64, torch.uint8, torch.bool, torch.uint64]
NAN, INF = math.nan, math.inf


@for_each("dtype", [*FLOATS, torch.complex64])
def test_one_bad_value_is_found_wherever_it_is(dtype: torch.dtype) -> None:
    assert all_finite(torch.empty((0, 3), dtype=dtype))
    for place in (0, 1, 999):
        for value in (NAN, INF, -INF):
            values = torch.ones(1000)
            values[place] = value
            assert not all_finite(values.to(dtype))
    assert not all_finite(torch.tensor([INF, -INF]).to(dtype))
    largest = torch.full((1000,), torch.finfo(dtype).max, dtype=torch.float64)
    assert all_finite(largest.to(dtype))  # though their sum is not
    assert all(all_finite(torch.ones(5).to(whole)) for whole in WHOLE)
    assert not all_finite(torch.tensor([1, complex(0, NAN)]))


@for_each("dtype", FLOATS)
def test_infinities_are_no_nan(dtype: torch.dtype) -> None:
    values = {"mask": [1.0, -INF], "spoilt": [INF, NAN], "fine": [1.0], "none": []}
    tensors = {name: torch.tensor(each).to(dtype) for name, each in values.items()}
    assert names_with_nan({**tensors, "count": torch.ones(2, dtype=torch.int64)}) == {"spoilt"}
