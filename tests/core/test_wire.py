"""Values as bytes: every kind comes back as it was, and nothing else gets through."""

import collections
import enum
from typing import Any

import msgspec
import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from onefold.core.encoding import decode, encode
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
        (object(), "the value is of type object, which no device can send"),
        ([1, {2}], r"the value\[1\] is of type set"),
        ({"a": (Color.RED,)}, r"the value\['a'\]\[0\] is of type Color"),
        (Pair(1, 2), "of type Pair"),
        ({3: 1}, "the value has the key 3, of type int: expected text"),
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
    with pytest.raises(ValueError, match="there is no"):
        decode(len(text).to_bytes(8, "little") + text + bytes(64))
