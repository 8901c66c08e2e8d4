"""What processes of one host say to each other, and how each hears of one that is gone."""

from __future__ import annotations

import os
import socket
import threading
from collections.abc import Callable, Iterator, Sequence

import pytest

from onefold.errors import DisagreementError, OnefoldError, PeerFailed, PeerLost, PeerTimeout
from onefold.exchange import mailbox
from onefold.exchange.mailbox import Mailbox
from onefold.exchange.transport import Transport
from tests.exchange.together import LIMIT_S, endings, mailboxes, together

SHORT_S = 0.2

Pair = list[Mailbox]
Wait = Callable[[Mailbox], object]

WAITS: dict[str, Wait] = {
    "a word": lambda box: box.meet(b"here"),
    "a note": lambda box: box.receive_note(1),
    "a file": lambda box: box.receive_file(1),
}
"""All in which device 0 waits for device 1."""

CALLS: dict[str, Wait] = {
    **WAITS,
    "sending a note": lambda box: box.send_note(1, b"x"),
    "sending a file": lambda box: box.send_file(1, 0),
}


@pytest.fixture(autouse=True)
def _quick(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(mailbox, "LOOK_S", 0.02)


@pytest.fixture
def pair() -> Iterator[Pair]:
    with mailboxes(2) as boxes:
        yield boxes


def file_of(content: bytes) -> int:
    descriptor = os.memfd_create("test")
    os.write(descriptor, content)
    return descriptor


# Words


@pytest.mark.parametrize("size", [1, 2, 4])
def test_all_get_the_words_of_all_in_their_order(size: int) -> None:
    with mailboxes(size) as boxes:
        for turn in range(50):
            said = together(size, lambda rank, t=turn: boxes[rank].meet(bytes([rank, t])))
            assert said == [[bytes([rank, turn]) for rank in range(size)]] * size


@pytest.mark.parametrize("length", [0, 1, Transport.frame_bytes])
def test_words_come_whole(pair: Pair, length: int) -> None:
    said = together(2, lambda rank: pair[rank].meet(bytes([65 + rank]) * length))
    assert said == [[b"A" * length, b"B" * length]] * 2


def test_nobody_goes_on_before_all_have_come(pair: Pair) -> None:
    passed = threading.Event()

    def early() -> None:
        pair[0].meet()
        passed.set()

    thread = threading.Thread(target=early)
    thread.start()
    assert not passed.wait(SHORT_S)
    pair[1].meet()
    thread.join(LIMIT_S)
    assert passed.is_set()


# Notes and files


@pytest.mark.parametrize("length", [0, 1, 32 * 1024, 32 * 1024 + 1, 1_000_003])
def test_a_note_of_any_length_comes_whole(pair: Pair, length: int) -> None:
    note = os.urandom(length)
    calls = (lambda: pair[0].receive_note(1), lambda: pair[1].send_note(0, note))
    assert together(2, lambda rank: calls[rank]())[0] == note


def test_notes_and_words_of_one_device_keep_their_order(pair: Pair) -> None:
    def call(rank: int) -> list[object]:
        box = pair[rank]
        if rank == 1:
            return [box.send_note(0, b"one"), box.send_note(0, b"two"), box.meet(b"three")]
        return [box.receive_note(1), box.receive_note(1), box.meet(b"mine")]

    assert together(2, call)[0] == [b"one", b"two", [b"mine", b"three"]]


def test_an_open_file_is_handed_over(pair: Pair) -> None:
    sent = file_of(b"common")
    pair[1].send_file(0, sent)
    os.close(sent)  # who receives it has one of his own
    received = pair[0].receive_file(1)
    assert os.pread(received, 100, 0) == b"common"
    os.close(received)


# Those who are gone


@pytest.mark.parametrize("wait", WAITS.values(), ids=WAITS)
def test_who_hangs_up_is_named(pair: Pair, wait: Wait) -> None:
    pair[0].step = 7
    pair[1].close()
    words = r"^device 1 \(process \d+\) ended without saying why.*device 0 waits for it in step 7$"
    with pytest.raises(PeerLost, match=words) as caught:
        wait(pair[0])
    assert (caught.value.device, caught.value.step) == (1, 7)


@pytest.mark.parametrize("call", CALLS.values(), ids=CALLS)
def test_who_hangs_up_without_reading_is_named(pair: Pair, call: Wait) -> None:
    """The kernel then says that the connection was reset."""
    pair[0].send_note(1, b"never read")
    pair[1].close()
    with pytest.raises(PeerLost, match=r"device 1 .* ended without saying why"):
        call(pair[0])


@pytest.mark.parametrize("unread", [False, True])
@pytest.mark.parametrize("wait", WAITS.values(), ids=WAITS)
def test_who_leaves_in_order_is_not_said_to_be_killed(
    pair: Pair, wait: Wait, *, unread: bool
) -> None:
    if unread:
        pair[0].send_note(1, b"never read")
    pair[1].tell_end()
    pair[1].close()
    words = r"^device 1 \(process \d+\) ended: its script came to an end before the others'"
    with pytest.raises(PeerLost, match=words) as caught:
        wait(pair[0])
    assert caught.value.device == 1


def test_what_was_sent_before_leaving_is_still_read(pair: Pair) -> None:
    pair[1].send_note(0, b"one")
    pair[1].send_note(0, b"two")
    pair[1].tell_end()
    pair[1].close()
    assert [pair[0].receive_note(1) for _ in range(2)] == [b"one", b"two"]
    with pytest.raises(PeerLost, match="its script came to an end"):
        pair[0].receive_note(1)


@pytest.mark.parametrize("call", CALLS.values(), ids=CALLS)
def test_who_fails_is_quoted(pair: Pair, call: Wait) -> None:
    pair[1].step = 5
    pair[1].tell_failure(ArithmeticError("over the top"))
    pair[1].close()
    with pytest.raises(PeerFailed, match=r"^device 1 failed in step 5: ArithmeticError: over the"):
        call(pair[0])


@pytest.mark.parametrize("call", CALLS.values(), ids=CALLS)
def test_who_fails_without_reading_is_quoted(pair: Pair, call: Wait) -> None:
    """Its words are there, though the kernel first says that the connection was reset."""
    pair[0].send_note(1, b"never read")
    pair[1].tell_failure(ArithmeticError("over the top"))
    pair[1].close()
    with pytest.raises(PeerFailed, match=r"^device 1 failed in step 1: ArithmeticError: over the"):
        call(pair[0])


class EndsEarly:
    """A socket that reports the end once while messages lie in it, as the kernel does at times.

    Seen in 9 of 40,000 pairs of processes of which one sends twice and hangs up: the other has
    looked for a message before the first and for the end after the last.
    """

    def __init__(self, real: socket.socket) -> None:
        self._real = real
        self._ended = False

    def recv(self, size: int, flags: int) -> bytes:
        return self._real.recv(size, flags) if self._once() else b""

    def recvmsg(self, *sizes: int) -> tuple[bytes, list[object], int, object]:
        return self._real.recvmsg(*sizes) if self._once() else (b"", [], 0, None)

    def _once(self) -> bool:
        before, self._ended = self._ended, True
        return before

    def __getattr__(self, name: str) -> object:
        return getattr(self._real, name)


@pytest.mark.parametrize("call", CALLS.values(), ids=CALLS)
def test_who_fails_is_quoted_though_its_end_is_seen_first(
    pair: Pair, call: Wait, monkeypatch: pytest.MonkeyPatch
) -> None:
    peer = pair[0]._peers[1]
    monkeypatch.setattr(peer, "socket", EndsEarly(peer.socket))
    pair[1].tell_failure(DisagreementError("device 1 has another model"))
    pair[1].close()
    with pytest.raises(DisagreementError, match=r"^device 1 has another model$"):
        call(pair[0])


def test_a_file_is_received_though_the_end_is_seen_first(
    pair: Pair, monkeypatch: pytest.MonkeyPatch
) -> None:
    peer = pair[0]._peers[1]
    monkeypatch.setattr(peer, "socket", EndsEarly(peer.socket))
    pair[1].send_file(0, file_of(b"common"))
    pair[1].close()
    received = pair[0].receive_file(1)
    assert os.pread(received, 100, 0) == b"common"
    os.close(received)


def test_a_failure_is_told_to_all_and_heard_while_the_device_lives_on() -> None:
    with mailboxes(3) as boxes:
        boxes[2].tell_failure(KeyError("weight"))
        errors = endings(2, lambda rank: boxes[rank].meet())
    assert [str(error) for error in errors] == ["device 2 failed in step 1: KeyError: 'weight'"] * 2
    assert [type(error) for error in errors] == [PeerFailed] * 2


@pytest.mark.parametrize("call", CALLS.values(), ids=CALLS)
def test_a_disagreement_is_one_on_every_device(pair: Pair, call: Wait) -> None:
    pair[1].tell_failure(DisagreementError("device 1 has another model"))
    pair[1].close()
    with pytest.raises(DisagreementError, match=r"^device 1 has another model$"):
        call(pair[0])


@pytest.mark.parametrize("letter", ["x", "é", "\U0001f600", "\0", '"'])
def test_a_failure_of_many_words_is_cut(pair: Pair, letter: str) -> None:
    pair[1].tell_failure(ValueError(letter * 100_000))
    with pytest.raises(PeerFailed) as caught:
        pair[0].meet()
    assert str(caught.value) == f"device 1 failed in step 1: ValueError: {letter * 4000}"


def test_a_device_that_is_gone_need_not_be_told(pair: Pair) -> None:
    pair[1].close()
    pair[0].tell_failure(ValueError("too late"))


def test_what_was_said_before_the_end_counts(pair: Pair) -> None:
    pair[1].send_note(0, b"last will")
    pair[1].close()
    assert pair[0].receive_note(1) == b"last will"
    with pytest.raises(PeerLost, match="device 1"):
        pair[0].receive_note(1)


@pytest.mark.parametrize("call", ["a word", "sending a note", "sending a file"])
def test_the_reason_counts_though_other_words_came_before_it(call: str) -> None:
    """The device had come to the meeting, and failed while it waited for this one."""
    with mailboxes(2, timeouts_s=(LIMIT_S, SHORT_S)) as (one, other):
        with pytest.raises(PeerTimeout) as caught:
            other.meet()
        other.tell_failure(caught.value)
        other.close()
        with pytest.raises(PeerFailed, match=r"^device 1 failed in step 1: PeerTimeout: device 0"):
            CALLS[call](one)


# Those who are elsewhere, or late

ELSEWHERE: dict[str, tuple[Wait, Wait]] = {
    "a note at a meeting": (WAITS["a word"], lambda box: box.send_note(0, b"x")),
    "a word for a note": (WAITS["a note"], lambda box: box.meet(b"x")),
    "a word for a file": (WAITS["a file"], lambda box: box.meet(b"x")),
    "a note for a file": (WAITS["a file"], lambda box: box.send_note(0, b"x")),
    "a file for a note": (WAITS["a note"], lambda box: box.send_file(0, 0)),
}


@pytest.mark.parametrize(("wait", "theirs"), ELSEWHERE.values(), ids=ELSEWHERE)
def test_calls_in_another_order_are_a_disagreement(wait: Wait, theirs: Wait) -> None:
    with mailboxes(2, timeouts_s=(LIMIT_S, SHORT_S)) as boxes:
        boxes[0].step = 3
        error, _ = endings(2, lambda rank: (wait, theirs)[rank](boxes[rank]))
    assert type(error) is DisagreementError
    assert "device 1 is at another point of the program than device 0 (step 3)" in str(error)
    assert "the same calls of the trainer in the same order" in str(error)


@pytest.mark.parametrize("wait", WAITS.values(), ids=WAITS)
def test_who_does_not_come_is_named_at_the_limit(wait: Wait) -> None:
    with mailboxes(2, timeouts_s=(SHORT_S, LIMIT_S)) as boxes:
        boxes[0].step = 4
        words = rf"^device 1 \(process {os.getpid()}\) did not arrive within 0.2 s in step 4, .*0 w"
        with pytest.raises(PeerTimeout, match=words) as caught:
            wait(boxes[0])
    assert (caught.value.device, caught.value.step) == (1, 4)


@pytest.mark.parametrize("starts_s", [(), (0, 0.2, 0, 0)], ids=["together", "1 last"])
def test_all_who_do_not_come_are_named_by_number(starts_s: Sequence[float]) -> None:
    """Device 2 has come, and has given up since."""
    with mailboxes(4, timeouts_s=(SHORT_S, LIMIT_S, SHORT_S), starts_s=starts_s) as boxes:
        with pytest.raises(PeerTimeout, match=r"^device 0 .*, 1 .*, 3 \(process \d+\) did not"):
            boxes[2].meet()
        with pytest.raises(PeerTimeout, match=r"^device 1 \(process \d+\), 3 \(process \d+\) did"):
            boxes[0].meet()


@pytest.mark.parametrize("wait", WAITS.values(), ids=WAITS)
def test_who_is_stopped_is_named_before_the_limit(
    pair: Pair, wait: Wait, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(mailbox.Stillness, "look", lambda self: True)
    with pytest.raises(PeerLost, match=r"^device 1 \(process \d+\) is stopped"):
        wait(pair[0])


def test_a_note_to_somebody_who_does_not_read_ends_at_the_limit() -> None:
    with mailboxes(2, timeout_s=1.0) as boxes:
        words = r"device 1 \(process \d+\) did not arrive within 1 s"
        with pytest.raises(PeerTimeout, match=words):
            boxes[0].send_note(1, bytes(10_000_000))


@pytest.mark.parametrize("call", CALLS.values(), ids=CALLS)
def test_a_mailbox_that_was_closed_says_so(pair: Pair, call: Wait) -> None:
    pair[0].close()
    pair[0].close()
    with pytest.raises(OnefoldError, match=r"^this trainer has left its run"):
        call(pair[0])
