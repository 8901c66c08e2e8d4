"""How the processes of one host come together, and who is shown out."""

from __future__ import annotations

import os
import socket
import threading
import time
import uuid
from collections.abc import Callable

import pytest

from onefold.errors import PeerLost, PeerTimeout
from onefold.exchange import mailbox
from onefold.exchange.mailbox import Mailbox, connected
from tests.exchange.together import LIMIT_S, endings, together

SHORT_S = 0.2


@pytest.fixture(autouse=True)
def _quick(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(mailbox, "LOOK_S", 0.02)


def start(rank: int, size: int = 2, **options: object) -> Mailbox:
    address = options.pop("address", f"test-{uuid.uuid4()}")
    limit = options.pop("timeout_s", SHORT_S)
    return Mailbox(
        connected(str(address), rank, size, limit, **options),  # type: ignore[arg-type]
        rank=rank,
        timeout_s=limit,
    )


@pytest.mark.parametrize(
    ("rank", "missing", "first"), [(0, "1, 2", 1), (1, "0", 0), (2, "0", 0)], ids=str
)
def test_those_who_do_not_join_are_named(rank: int, missing: str, first: int) -> None:
    before = set(os.listdir("/proc/self/fd"))
    words = f"^device {missing} did not join within 0.2 s. Every device must run the same script"
    with pytest.raises(PeerTimeout, match=words) as caught:
        start(rank, 3)
    assert (caught.value.device, caught.value.step) == (first, 0)
    assert set(os.listdir("/proc/self/fd")) == before


def test_those_who_did_join_are_let_go() -> None:
    before = set(os.listdir("/proc/self/fd"))
    address = f"test-{uuid.uuid4()}"
    errors = endings(2, lambda rank: start(rank, 3, address=address, timeout_s=1.0))
    assert ["2 did not join" in str(error) for error in errors] == [True, True]
    assert set(os.listdir("/proc/self/fd")) == before


@pytest.mark.parametrize(("rank", "gone"), [(0, 1), (1, 0)])
def test_who_has_ended_is_not_waited_for(rank: int, gone: int) -> None:
    with pytest.raises(PeerLost, match=f"device {gone} came to the end of its script") as caught:
        start(rank, timeout_s=LIMIT_S, ended=lambda number: number == gone)
    assert caught.value.device == gone


def test_devices_of_two_runs_do_not_meet() -> None:
    errors = endings(2, lambda rank: start(rank))
    assert [type(error) for error in errors] == [PeerTimeout] * 2


def test_the_name_of_one_device_tells_nothing_of_the_others() -> None:
    names = [mailbox._socket_name("drawn-0", rank) for rank in range(3)]
    drawn = [name.removeprefix("\0onefold-") for name in names]
    assert [len(name) for name in drawn] == [32] * 3
    assert len({name[:8] for name in drawn}) == 3


HELLOS = {
    "nothing": [],
    "nothing at all, and gone": [None],
    "too little": [b"abc"],
    "one that is not missing": [mailbox._HELLO.pack(0)],
    "one that there is not": [mailbox._HELLO.pack(9)],
    "a negative one": [mailbox._HELLO.pack(-1)],
}


@pytest.mark.parametrize("hello", HELLOS.values(), ids=HELLOS)
def test_a_stranger_is_shown_out(
    hello: list[bytes | None], monkeypatch: pytest.MonkeyPatch
) -> None:
    """One of the same user, who knows the name, and comes before the device."""
    monkeypatch.setattr(mailbox, "_HELLO_S", SHORT_S)
    address = f"test-{uuid.uuid4()}"
    shown_out = threading.Event()

    def call(rank: int) -> list[bytes]:
        if rank == 1:
            visit(address, hello)
            shown_out.set()
        box = start(rank, address=address, timeout_s=LIMIT_S)
        try:
            return box.meet(bytes([rank]))
        finally:
            box.close()

    assert together(2, call) == [[b"\0", b"\1"]] * 2
    assert shown_out.is_set()


def visit(address: str, hello: list[bytes | None]) -> None:
    """Connect to device 0, say something, and wait until it hangs up."""
    with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as stranger:
        stranger.settimeout(LIMIT_S)
        limit = time.monotonic() + LIMIT_S
        while stranger.connect_ex(mailbox._socket_name(address, 0)) != 0:
            assert time.monotonic() < limit, "nobody listens"
        for words in hello:
            if words is None:
                return
            stranger.send(words)
        assert stranger.recv(10) == b""


@pytest.fixture
def _of_another_user(monkeypatch: pytest.MonkeyPatch) -> None:
    """What is at the other end of any connection."""
    credentials = mailbox.credentials
    monkeypatch.setattr(mailbox, "credentials", lambda c: (credentials(c)[0], os.getuid() + 1))


@pytest.mark.usefixtures("_of_another_user")
def test_a_stranger_of_another_user_is_shown_out_whatever_it_says() -> None:
    address = f"test-{uuid.uuid4()}"
    calls: list[Callable[[], object]] = [
        lambda: start(0, address=address, timeout_s=1.0),
        lambda: visit(address, [mailbox._HELLO.pack(1)]),
    ]
    error, _ = endings(2, lambda rank: calls[rank]())
    assert type(error) is PeerTimeout


@pytest.mark.usefixtures("_of_another_user")
def test_a_stranger_in_the_place_of_a_device_is_told_nothing() -> None:
    address = f"test-{uuid.uuid4()}"
    with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as listener:
        listener.bind(mailbox._socket_name(address, 0))
        listener.listen()
        with pytest.raises(PeerTimeout, match="device 0 did not join"):
            start(1, address=address)
        connection, _ = listener.accept()
        with connection:
            assert connection.recv(100) == b""
