"""Containers that batches come in, and others like them."""

from __future__ import annotations

from collections import OrderedDict, UserDict, defaultdict
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Any, NamedTuple

import pytest

from onefold.core.structure import parts_of, with_parts
from tests.tables import for_each


class Pair(NamedTuple):
    left: object
    right: object


@dataclass
class Open:
    x: object
    y: object = None
    made: int = field(default=0, init=False)

    def __post_init__(self) -> None:
        self.made += 1


@dataclass(frozen=True, slots=True)
class Closed:
    x: object
    y: object


class Encoding(UserDict[str, object]):
    """As tokenizers return them: with more than its items."""

    def __init__(self, data: dict[str, object], *, kept: str) -> None:
        super().__init__(data)
        self.kept = kept


class Several(list[object]):
    """A list of another kind."""


class Odd(Mapping[str, object]):
    """Made from something other than its items."""

    def __init__(self, *, of: int) -> None:
        self.of = of

    def __getitem__(self, key: str) -> object:
        return self.of

    def __iter__(self) -> Iterator[str]:
        return iter("ab")

    def __len__(self) -> int:
        return 2


@for_each(
    "container",
    [
        [1, 2],
        (1, 2),
        {"a": 1, "b": 2},
        Pair(1, 2),
        Closed(1, 2),
        OrderedDict(b=1, a=2),
        defaultdict(list, a=1, b=2),
        Encoding({"a": 1, "b": 2}, kept="more"),
        MappingProxyType({"a": 1, "b": 2}),
        Several([1, 2]),
    ],
)
def test_one_like_another_has_its_type_and_the_new_parts(container: Any) -> None:
    paths, parts = zip(*(parts_of(container) or ()), strict=True)
    assert parts == (1, 2)
    made = with_parts(container, [3, 4])
    assert type(made) is type(container)
    assert parts_of(made) == list(zip(paths, (3, 4), strict=True))
    assert parts_of(container) == list(zip(paths, (1, 2), strict=True))


def test_what_else_a_container_holds_goes_along() -> None:
    assert with_parts(Encoding({"a": 1}, kept="more"), [2]).kept == "more"
    assert with_parts(defaultdict(list, a=1), [2]).default_factory is list
    made = with_parts(Open(1), [2, 3, 4])
    assert (made.x, made.y, made.made) == (2, 3, 4)


def test_what_is_no_container_has_no_parts_and_what_cannot_be_made_anew_is_refused() -> None:
    assert [parts_of(value) for value in ("ab", 3, None, {1, 2}, Open)] == [None] * 5
    with pytest.raises(TypeError, match=r"and Odd cannot .*Use a dict, a tuple or a dataclass"):
        with_parts(Odd(of=1), [2, 3])
