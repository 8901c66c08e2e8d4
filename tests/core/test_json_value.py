"""Values in checkpoints, as JSON."""

import json
import math
from collections import Counter, OrderedDict, deque
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from onefold.core.encoding import from_json, to_json

leaves = st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text()
nested = st.recursive(
    leaves,
    lambda inner: (
        st.lists(inner)
        | st.tuples(inner, inner)
        | st.dictionaries(st.text(), inner)
        | st.dictionaries(st.integers() | st.tuples(st.integers()), inner)
    ),
    max_leaves=20,
)
OTHERS = [
    *(Counter({3: 1, 9: 2}), OrderedDict([("b", 1), ("a", (2,))]), deque([1, 2]), {1, 2, 3}),
    *({"kind of value": "tuple", "items": []}, (), {}, -0.0, math.inf),
]


def there_and_back(value: object) -> Any:
    return from_json(json.loads(json.dumps(to_json(value, "it"))))


@given(nested | st.sampled_from(OTHERS))
def test_values_come_back_as_they_were(value: object) -> None:
    back = there_and_back(value)
    assert back == value
    assert type(back) is type(value)


def test_nan_stays_nan_and_numbers_of_numpy_become_pythons() -> None:
    assert math.isnan(there_and_back(math.nan))
    back = there_and_back([np.float64(0.1), np.int64(3), np.float32(0.5), np.bool_(True)])
    assert back == [0.1, 3, 0.5, True]
    assert [type(v) for v in back] == [float, int, float, bool]


def test_a_tensor_or_array_keeps_type_shape_and_bits() -> None:
    for dtype in (torch.float32, torch.float64, torch.bfloat16, torch.int64):
        for tensor in ((torch.randn(3, 2) * 10).to(dtype), torch.tensor(0.1).to(dtype)):
            back = there_and_back({"lr": tensor})["lr"]
            assert back.dtype == dtype
            assert torch.equal(back, tensor)
    for kind in ("?", "u4", "i8", "f4", ">f8"):
        array = (np.random.default_rng(1).random((3, 2)) * 10).astype(kind)
        back = there_and_back({"key": array})["key"]
        assert (back.dtype, back.tobytes()) == (array.dtype, array.tobytes())


def test_an_array_of_another_kind_is_refused() -> None:
    with pytest.raises(TypeError, match="it is of type ndarray, which a checkpoint"):
        to_json(np.zeros(2, "O"), "it")
    for dtype in ("O", "U3", "f8,f8", "nothing"):
        with pytest.raises(ValueError, match="a value is not as a checkpoint has it"):
            from_json({**to_json(np.zeros(2), "it"), "dtype": dtype})
