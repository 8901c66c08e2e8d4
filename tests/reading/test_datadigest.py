"""Equal data have equal digests in any process; data that differ mostly do not."""

from __future__ import annotations

import copy
import enum
from collections import OrderedDict, namedtuple
from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from onefold.reading.reader import digest_of, digest_samples, join_digests
from tests.tables import for_each

Pair = namedtuple("Pair", "left right")


@dataclass
class Record:
    name: str
    values: Any = None


class Plain:
    def __init__(self, **fields: Any) -> None:
        self.__dict__.update(fields)


class Opaque:
    """Nothing of it can be seen."""

    __slots__ = ("hidden",)

    def __init__(self, hidden: int) -> None:
        self.hidden = hidden


Colour = enum.Enum("Colour", "RED BLUE")


class Loud(int):
    """Says where it lies, which is another place in every process."""

    __repr__ = object.__repr__


DIFFERENT: dict[str, tuple[Any, Any]] = {
    "values": (torch.tensor([1.0, 2.0]), torch.tensor([1.0, 3.0])),
    "shape": (torch.zeros(2, 3), torch.zeros(3, 2)),
    "a bit": (torch.tensor(0.0), torch.tensor(-0.0)),
    "conj": (torch.tensor([1 + 2j]), torch.tensor([1 + 2j]).conj()),
    "array or tensor": (np.zeros(2, np.float32), torch.zeros(2)),
    "object array": (np.array([[1], None], dtype=object), np.array([[2], None], dtype=object)),
    "masked": (np.ma.masked_equal([1, 2], 1), np.ma.masked_equal([1, 2], 2)),
    "fields": (np.zeros(2, [("a", "i4")]), np.zeros(2, [("b", "i4")])),
    "number": (1, 2),
    "kind of number": (1, 1.0),
    "truth": (True, 1),
    "huge": (10**5000, 10**5000 + 1),
    "complex": (1j, 2j),
    "text or bytes": ("a", b"a"),
    "order": ([1, 2], [2, 1]),
    "list or tuple": ([1], (1,)),
    "cut elsewhere": (["ab", "c"], ["a", "bc"]),
    "key": ({"a": 1}, {"b": 1}),
    "value": ({"a": 1, "b": 2}, {"a": 2, "b": 1}),
    "set": ({1, 2}, {1, 3}),
    "record": (Record("a"), Record("b")),
    "within a record": (Record("a", [torch.zeros(1)]), Record("a", [torch.ones(1)])),
    "object": (Plain(a=1), Plain(a=2)),
    "type": (Plain(a=1), Opaque(1)),
    "choice": (Colour.RED, Colour.BLUE),
    "function": (len, print),
    "class": (Plain, Opaque),
    "ordered": (OrderedDict(a=1), {"a": 1}),
}


@for_each("name", DIFFERENT)
def test_what_differs_has_another_digest(name: str) -> None:
    one, other = DIFFERENT[name]
    assert digest_of(one) != digest_of(other)
    assert digest_of([one]) != digest_of([other])


def test_pictures_count_by_their_pixels() -> None:
    new = pytest.importorskip("PIL.Image").new

    def palette(first: int) -> Any:
        made = new("P", (2, 3), 0)
        made.putpalette([first, 0, 0] * 256)
        return made

    pictures = [new("L", (2, 3), 1), new("L", (2, 3), 2), new("I", (2, 3), 1), new("L", (3, 2), 1)]
    assert len({digest_of(each) for each in [*pictures, palette(1), palette(2)]}) == 6
    assert digest_of(new("L", (2, 3), 1)) == digest_of(pictures[0])


ALIKE: dict[str, tuple[Any, Any]] = {
    "order of a set": ({0, 8}, {8, 0}),
    "order of names": ({"a": {0, 8}, "b": 1}, {"b": 1, "a": {8, 0}}),
    "strides": (torch.arange(6).view(2, 3).t(), torch.arange(6).view(2, 3).t().contiguous()),
    "array strides": (np.arange(6)[::2], np.array([0, 2, 4])),
    "gradient": (torch.ones(2, requires_grad=True), torch.ones(2)),
    "order of keys": ({"a": 1, "b": 2}, {"b": 2, "a": 1}),
    "nan": (float("nan"), float("nan")),
    "hidden": (Opaque(1), Opaque(2)),
    "unknown": (Plain(a=object()), Plain(a=object())),
    "iterator": (iter([1]), iter([2])),
    "where it lies": (Loud(3), Loud(3)),
    "below the mask": (np.ma.masked_equal([1, 2], 1), np.ma.array([5, 2], mask=[1, 0])),
    "sparse": (torch.eye(2).to_sparse(), torch.eye(2).to_sparse()),
    "nowhere": (torch.zeros(2, device="meta"), torch.zeros(2, device="meta")),
    "modules and methods": ([np, Plain().__init__], [np, Plain(other=1).__init__]),  # type: ignore[misc]
}


@for_each("name", ALIKE)
def test_what_is_alike_or_cannot_be_seen_has_the_same(name: str) -> None:
    one, other = ALIKE[name]
    assert digest_of(one) == digest_of(other)


def test_what_lies_between_the_fields_does_not_count() -> None:
    kind = np.dtype([("a", "u1"), ("b", "<i4")], align=True)
    one, other = (np.frombuffer(bytes([filling]) * 16, np.uint8).copy() for filling in (1, 2))
    records = [each.view(kind) for each in (one, other)]
    for record in records:
        record["a"], record["b"] = 3, 4
    assert one.tobytes() != other.tobytes()
    assert digest_of(records[0]) == digest_of(records[1])
    assert digest_of(records[0][0]) == digest_of(records[1][0])


def test_what_lies_in_itself_or_very_deep_comes_to_an_end() -> None:
    def circle(value: int) -> list[Any]:
        made: list[Any] = [value]
        made.append({"back": made})
        return made

    def tower(value: object, height: int, width: int = 1) -> object:
        for _ in range(height):
            value = [value] * width
        return value

    assert digest_of(circle(1)) == digest_of(circle(1)) != digest_of(circle(2))
    assert digest_of(tower(1, 5000)) == digest_of(tower(1, 5000))
    assert digest_of(tower(1, 40)) != digest_of(tower(2, 40))
    assert digest_of(tower(1, 49, 2)) == digest_of(tower(1, 49, 2))


values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text() | st.binary(),
    lambda inner: (
        st.lists(inner, max_size=3)
        | st.dictionaries(st.text(), inner, max_size=3)
        | st.builds(Record, st.text(), inner)
    ),
    max_leaves=8,
)


@given(value=values)
def test_a_digest_depends_on_the_value_alone(value: Any) -> None:
    assert digest_of(value) == digest_of(copy.deepcopy(value))


@for_each(
    ("samples", "read"),
    [(1, [0]), (2, [0, 1]), (3, [0, 1, 2]), (10, [0, 5, 9]), (10**9, [0, 5 * 10**8, 10**9 - 1])],
)
def test_at_most_three_samples_are_read(samples: int, read: list[int]) -> None:
    """And the digest of a data set is a number of 64 bits, which is not 0."""
    assert digest_samples(samples) == read
    joined = [join_digests(samples + n, [digest_of(None)]) for n in range(100)]
    assert len(set(joined)) == 100
    assert all(number and -(2**63) <= number < 2**63 for number in joined)


def test_a_digest_does_not_depend_on_the_process() -> None:
    """Nor on the order of sets, which is another one in each; so it is always this one."""
    sample = [
        {"one", "two"},
        frozenset({"one", "two"}),
        torch.ones(3),
        {"a": None},
        np.array(["a", None], dtype=object),
    ]
    assert digest_of(sample).hex() == "12055cba12dfc0decd9b2918444006d6"
