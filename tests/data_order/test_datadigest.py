"""Equal data have equal digests in any process; data that differ mostly do not."""

import copy
import enum
from collections import OrderedDict, namedtuple
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from onefold.data_order.reader import digest_of, digest_samples, join_digests
from tests.tables import for_each

Pair = namedtuple("Pair", "left right")
Color = enum.Enum("Color", "RED BLUE")


@dataclass(slots=True)
class Record:
    name: str
    values: Any = None


values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text() | st.binary(),
    lambda inner: (
        st.lists(inner, max_size=3)
        | st.tuples(inner, inner)
        | st.dictionaries(st.text(), inner, max_size=3).map(lambda made: dict(sorted(made.items())))
        | st.builds(Record, st.text(), inner)
        | st.builds(lambda each: SimpleNamespace(field=each), inner)
    ),
    max_leaves=8,
)


@given(one=values, other=values)
def test_a_digest_depends_on_the_value_alone(one: Any, other: Any) -> None:
    assert digest_of(one) == digest_of(copy.deepcopy(one))
    pair = digest_of(one), digest_of(other)
    # By their text, in which 1, 1.0 and True differ too.
    assert (pair[0] == pair[1]) == (repr(one) == repr(other))


@for_each(
    ("one", "other"),
    [
        (torch.tensor([1.0, 2.0]), torch.tensor([1.0, 3.0])),
        (torch.zeros(2), torch.zeros(2, dtype=torch.int32)),
        (torch.zeros(2, 3), torch.zeros(3, 2)),
        (torch.tensor(0.0), torch.tensor(-0.0)),
        (torch.ones(3, dtype=torch.bfloat16), torch.zeros(3, dtype=torch.bfloat16)),
        (torch.tensor([1 + 2j]), torch.tensor([1 + 2j]).conj()),
        (np.zeros(2, np.float32), torch.zeros(2)),
        (np.array([[1], None], dtype=object), np.array([[2], None], dtype=object)),
        (np.ma.masked_equal([1, 2], 1), np.ma.masked_equal([1, 2], 2)),
        (np.zeros(2, [("a", "i4")]), np.zeros(2, [("b", "i4")])),
        (10**5000, 10**5000 + 1),
        ({1, 2}, {1, 3}),
        (Pair(1, 2), (1, 2)),
        (OrderedDict(a=1), {"a": 1}),
        (Color.RED, Color.BLUE),
        (len, print),
        (Pair, Record),
    ],
)
def test_what_differs_has_another_digest(one: Any, other: Any) -> None:
    assert digest_of(one) != digest_of(other)
    assert digest_of([one]) != digest_of([other])


def test_pictures_count_by_their_pixels() -> None:
    new = pytest.importorskip("PIL.Image").new
    pictures = [new("L", (2, 3), 1), new("L", (2, 3), 2), new("I", (2, 3), 1), new("L", (3, 2), 1)]
    for first in (1, 2):
        pictures.append(new("P", (2, 3), 0))
        pictures[-1].putpalette([first, 0, 0] * 256)
    assert len({digest_of(each) for each in pictures}) == 6
    assert digest_of(new("L", (2, 3), 1)) == digest_of(pictures[0])


@for_each(
    ("one", "other"),
    [
        (torch.arange(6).view(2, 3).t(), torch.arange(6).view(2, 3).t().contiguous()),
        (np.arange(6)[::2], np.array([0, 2, 4])),
        ({0, 8}, {8, 0}),
        ({"a": 1, "b": 2}, {"b": 2, "a": 1}),
        (SimpleNamespace(a=object()), SimpleNamespace(a=object())),
        (iter([1]), iter([2])),
        (np.ma.masked_equal([1, 2], 1), np.ma.array([5, 2], mask=[True, False])),
        (torch.eye(2).to_sparse(), torch.eye(2).to_sparse()),
        (torch.zeros(2, device="meta"), torch.zeros(2, device="meta")),
        ([np, SimpleNamespace().__init__], [np, SimpleNamespace(other=1).__init__]),  # type: ignore[misc]
    ],
)
def test_what_is_alike_or_cannot_be_seen_has_the_same(one: Any, other: Any) -> None:
    assert digest_of(one) == digest_of(other)


def test_what_lies_in_itself_or_very_deep_comes_to_an_end() -> None:
    circle: list[Any] = [1]
    circle.append({"back": circle})
    tower: Any = 1
    for _ in range(5000):
        tower = [tower]
    wide: Any = 1
    for _ in range(49):
        wide = [wide, wide]
    assert len({digest_of(each) for each in (circle, tower, wide, tower[0], circle)}) >= 3


@for_each(("samples", "read"), [(1, [0]), (2, [0, 1]), (10**9, [0, 5 * 10**8, 10**9 - 1])])
def test_at_most_three_samples_are_read(samples: int, read: list[int]) -> None:
    """And the digest of a data set is a number of 64 bits, which is not 0."""
    assert digest_samples(samples) == read
    joined = [join_digests(samples + n, [digest_of(None)]) for n in range(100)]
    assert len(set(joined)) == 100
    assert all(number and -(2**63) <= number < 2**63 for number in joined)


def test_a_digest_does_not_depend_on_the_process() -> None:
    """Nor on the order of sets, which is another one in each; so it is always this one."""
    names = {"one", "two"}
    sample = [names, frozenset(names), torch.ones(3), {"a": None}, np.array(["a"], dtype=object)]
    assert digest_of(sample).hex() == "cb523ce67c5867f653da38135a0939e8"
