"""Values as bytes and as JSON: each kind comes back as it was, and nothing else gets through."""

import collections
import enum
import json
import math
from collections import Counter, OrderedDict, deque
from typing import Any

import msgspec
import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from onefold.core.encoding import decode, encode, from_json, to_json
from tests.between import mine, shown
from tests.tables import for_each

plain = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text() | st.binary(),
    lambda inner: st.lists(inner) | st.tuples(inner, inner) | st.dictionaries(st.text(), inner),
    max_leaves=20,
)


@settings(max_examples=100)
@given(plain)
def test_every_value_comes_back(value: Any) -> None:
    assert shown(decode(encode(value, "value") + b"more")) == shown(value)


def test_so_do_tensors_and_arrays_as_what_they_show() -> None:
    value = mine(1)
    found = decode(encode(value, "value"))
    assert shown(found) == shown(value)
    assert not found["scalar"].requires_grad
    found["array"][0, 0] = 7  # its own memory
    assert decode(encode(torch.zeros(3, 1).expand(3, 4), "value")).tolist() == [[0.0] * 4] * 3
    assert decode(encode(torch.tensor([1 + 2j]).conj(), "value")).tolist() == [1 - 2j]
    assert type(decode(encode(collections.OrderedDict(a=1), "value"))) is dict


class Color(enum.IntEnum):
    RED = 1


Pair = collections.namedtuple("Pair", "one other")


NESTED: list[object] = []
NESTED.append(NESTED)


def test_everything_else_is_refused_by_name() -> None:
    for value, words in (
        (object(), "the value is of type object, which cannot be sent"),
        ([1, {2}], r"the value\[1\] is of type set"),
        ({"a": (Color.RED,)}, r"the value\['a'\]\[0\] is of type Color"),
        (Pair(1, 2), "of type Pair"),
        ({3: 1}, "the value has the key 3 of type int, but keys must be strings"),
        (np.array([object()]), "a NumPy ndarray of object.*tolist"),
        (np.array(["text"]), "a NumPy ndarray of <U4"),
        (np.ma.masked_array([1.0]), "a NumPy MaskedArray"),
        (torch.zeros(2, 2).to_sparse(), r"a cpu torch.sparse_coo tensor.*to_dense"),
        (torch.zeros(2, device="meta"), "a meta torch.strided tensor"),
        (1 + 2j, "of type complex"),
        (lambda: None, "of type function"),
        (NESTED, "nested more than 50 levels deep"),
    ):
        with pytest.raises(TypeError, match=words):
            encode(value, "the value")


@for_each(
    "tree", [["object"], ["tensor", "load", [1]], ["array", "|O", [1]], ["scalar", "<U3", []]]
)
def test_nothing_else_is_ever_constructed(tree: list[object]) -> None:
    text = msgspec.msgpack.encode(tree)
    with pytest.raises(ValueError, match="unknown kind of value"):
        decode(len(text).to_bytes(8, "little") + text + bytes(64))


# Values in checkpoints, as JSON


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
    with pytest.raises(
        TypeError, match="it is of type ndarray, which cannot be saved in a checkpoint"
    ):
        to_json(np.zeros(2, "O"), "it")
    for dtype in ("O", "U3", "f8,f8", "nothing"):
        with pytest.raises(ValueError, match="a value in the checkpoint is damaged"):
            from_json({**to_json(np.zeros(2), "it"), "dtype": dtype})
