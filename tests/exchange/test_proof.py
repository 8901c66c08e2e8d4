"""Only those who know the secret of a run take part in it."""

import hashlib
from collections.abc import Callable, Sequence
from threading import Barrier

import pytest

from onefold.errors import DisagreementError
from onefold.exchange.connections import prove
from tests.exchange.together import LIMIT_S, endings
from tests.tables import for_each

SECRET = b"long enough that nobody guesses it"
Trade = Callable[[bytes], Sequence[bytes]]


class Wire:
    """What devices that are threads give to each other, and all that went over it."""

    def __init__(self, size: int) -> None:
        self.seen: list[list[bytes]] = []
        self._barrier = Barrier(size, timeout=LIMIT_S, action=self._note)
        self._given = [b""] * size

    def trade(self, rank: int) -> Trade:
        def give(word: bytes) -> Sequence[bytes]:
            self._given[rank] = word
            self._barrier.wait()
            return self.seen[-1]

        return give

    def _note(self) -> None:
        self.seen.append(list(self._given))


def prove_all(secrets: Sequence[bytes], wire: Wire) -> list[str]:
    """How each device ends: in words, or in peace."""
    errors = endings(len(secrets), lambda rank: prove(secrets[rank], rank, wire.trade(rank)))
    assert all(error is None or type(error) is DisagreementError for error in errors)
    return ["" if error is None else str(error) for error in errors]


@for_each("size", [1, 2, 5])
@for_each("secret", [SECRET, b""])
def test_those_who_know_the_secret_belong_together(size: int, secret: bytes) -> None:
    assert prove_all([secret] * size, Wire(size)) == [""] * size


@for_each("theirs", [b"", SECRET + b".", SECRET[:-1], SECRET.upper()])
def test_who_does_not_know_it_is_named(theirs: bytes) -> None:
    said = prove_all([SECRET, SECRET, theirs], Wire(3))
    for rank, other in ((0, 2), (1, 2), (2, 0)):
        assert said[rank].startswith(
            f"device {other} has not shown that it belongs to this run, as device {rank} expects"
        )
        assert "ONEFOLD_SECRET" in said[rank]


def refused(trade: Trade) -> None:
    with pytest.raises(DisagreementError, match=r"^device 1 has not shown"):
        prove(SECRET, 0, trade)


def test_the_secret_is_not_sent_and_what_was_heard_is_of_no_use() -> None:
    first, second = Wire(2), Wire(2)
    for wire in (first, second):
        prove_all([SECRET, SECRET], wire)
    given = [word for wire in (first, second) for words in wire.seen for word in words]
    assert len(set(given)) == len(given) == 8, "nothing is given twice"
    for word in given:
        assert len(word) == 32
        assert word != hashlib.sha256(SECRET).digest()
    heard = iter(words[1] for words in first.seen)
    refused(lambda word: [word, next(heard)])
    refused(lambda word: [word, word])
    for answer in (b"", b"\0" * 32, b"x" * 64):
        answers = iter([b"\0" * 32, answer])
        refused(lambda word, answers=answers: [word, next(answers)])


HERE = [("10.0.0.1:7", "10.0.0.2:7")]
"""The connection of device 0, as it sees it itself."""


@for_each(
    ("secret", "theirs", "alike"),
    [
        (SECRET, [("10.0.0.2:7", "10.0.0.1:7")], True),
        (SECRET, [("10.0.0.9:1", "10.0.0.8:1"), ("10.0.0.2:7", "10.0.0.1:7")], True),
        (SECRET, [], False),
        (SECRET, [("10.0.0.2:7", "10.0.0.1:8")], False),  # a relay on the same host
        (SECRET, [("10.0.0.2:7", "192.168.0.1:7")], False),  # addresses are translated
        (SECRET, HERE, False),  # the list of device 0, said again
        (b"", [], True),  # nothing is bound
    ],
)
def test_both_see_one_connection(secret: bytes, theirs: list[tuple[str, str]], alike: bool) -> None:
    wire, seen = Wire(2), [HERE, theirs]
    errors = endings(2, lambda rank: prove(secret, rank, wire.trade(rank), seen[rank]))
    assert [error is None for error in errors] == [alike] * 2
    for rank, error in enumerate(errors):
        words = f"device {rank} and device {1 - rank} know the secret of the run, but are not"
        assert alike or (str(error).startswith(words) and "(NAT)" in str(error))
