from __future__ import annotations

import pytest

from onefold.system.words import counted, listed


@pytest.mark.parametrize(("number", "text"), [(1, "1 device"), (2, "2 devices"), (0, "0 devices")])
def test_nouns_follow_their_number(number: int, text: str) -> None:
    assert counted(number, "device") == text


@pytest.mark.parametrize(
    ("names", "text"),
    [
        ("", ""),
        ("a", "a"),
        ("abc", "a, b, c"),
        ("abcd", "a, b, c and 1 more"),
        ("abcdef", "a, b, c and 3 more"),
    ],
)
def test_the_first_names_are_listed(names: str, text: str) -> None:
    assert listed(iter(names), most=3) == text
