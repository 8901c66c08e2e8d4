from __future__ import annotations

import os
import pickle
from pathlib import Path

import pytest

from onefold.data.bad import BadFile, readable, refuse
from onefold.errors import DataError
from tests.tables import for_each


def bad_files(count: int) -> list[BadFile]:
    return [BadFile(Path(f"{number}.png"), f"reason {number}") for number in range(count)]


def test_nothing_bad_is_not_refused() -> None:
    assert refuse([]) is None  # type: ignore[func-returns-value]


@for_each("count", [1, 4, 5])
def test_up_to_five_are_all_named(count: int) -> None:
    with pytest.raises(
        DataError, match=f"^{count} of the files and lines cannot be used"
    ) as caught:
        refuse(bad_files(count))
    _, *told, advice = str(caught.value).splitlines()
    assert told == [f"  {number}.png: reason {number}" for number in range(count)]
    assert advice.endswith("--skip-bad")


@for_each(("count", "more"), [(6, 1), (1005, 1000)])
def test_of_many_five_are_named_and_the_others_counted(count: int, more: int) -> None:
    with pytest.raises(
        DataError, match=f"^{count} of the files and lines cannot be used"
    ) as caught:
        refuse(bad_files(count))
    _, *told, rest, _ = str(caught.value).splitlines()
    assert told == [f"  {number}.png: reason {number}" for number in range(5)]
    assert rest == f"  and {more} more"


def test_the_line_of_a_file_is_told() -> None:
    assert str(BadFile(Path("a/b.tsv"), "why", 7)) == "a/b.tsv, line 7: why"


def test_a_name_that_is_not_utf_8_can_be_written() -> None:
    path = Path(os.fsdecode(b"caf\xe9.png"))
    assert readable(path) == "caf\\xe9.png"
    assert str(BadFile(path, "why")).encode() == b"caf\\xe9.png: why"


@for_each("name", ["猫/ñandú 1.png", "a b/'c'.png", "."])
def test_any_other_name_is_told_as_it_is(name: str) -> None:
    assert readable(Path(name)) == name


def test_what_is_bad_reaches_other_processes() -> None:
    (bad,) = bad_files(1)
    assert pickle.loads(pickle.dumps(bad)) == bad
