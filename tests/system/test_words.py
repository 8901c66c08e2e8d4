from __future__ import annotations

from onefold.system.words import counted, listed, message_of, words_of_failure
from tests.tables import for_each


@for_each(("number", "text"), [(1, "1 device"), (2, "2 devices"), (0, "0 devices")])
def test_nouns_follow_their_number(number: int, text: str) -> None:
    assert counted(number, "device") == text


@for_each(
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


class Silent(Exception):
    def __str__(self) -> str:
        raise KeyError("no words")


def test_a_message_can_always_be_shown() -> None:
    assert message_of(ValueError("one\ntwo")) == "one\ntwo"
    assert message_of(Silent()) == "its message cannot be shown, as its own str() raised KeyError"
    assert message_of(ValueError("\udcff")) == "\\udcff"
    assert len(message_of(ValueError("x" * 10**6))) == 4000


def test_the_end_of_a_device_is_told_as_what_it_was() -> None:
    assert words_of_failure(KeyError("a"), 2) == "failed in step 2: KeyError: 'a'"
    assert words_of_failure(Silent(), 2).startswith("failed in step 2: Silent: its message cannot")
    assert words_of_failure(SystemExit(0), 2).startswith("ended by sys.exit(0) in step 2, which")
