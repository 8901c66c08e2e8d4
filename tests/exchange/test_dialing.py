"""How the processes of one host come together, and who is shown out."""

import os
import socket
import struct
import threading
import time
import uuid

import pytest

from onefold.errors import PeerTimeout
from onefold.exchange import mailbox, progress
from onefold.exchange.mailbox import Mailbox, connected
from tests.exchange.together import LIMIT_S, endings, together
from tests.tables import for_each

SHORT_S = 0.2


@pytest.fixture(autouse=True)
def _quick(monkeypatch: pytest.MonkeyPatch) -> None:
    for module in (mailbox, progress):
        monkeypatch.setattr(module, "LOOK_S", 0.02)


def drawn() -> str:
    return f"test-{uuid.uuid4()}"


@for_each(("rank", "missing", "first"), [(0, "1, 2", 1), (1, "0", 0), (2, "0", 0)])
def test_those_who_do_not_join_are_named(
    rank: int,
    missing: str,
    first: int,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    monkeypatch.setattr(progress, "FIRST_S", 0.1)
    before = os.listdir("/proc/self/fd")
    words = f"^device {missing} did not join within 0.2 s: every device must run the same script"
    with pytest.raises(PeerTimeout, match=words) as caught:
        connected(drawn(), rank, 3, SHORT_S)
    assert (caught.value.device, caught.value.step) == (first, 0)
    assert os.listdir("/proc/self/fd") == before
    said = f"device {rank} has waited for 0 s: not yet there: device {missing}"
    assert (said in caplog.text) == (rank < 2)


def visit(address: str, hello: bytes | None) -> None:
    """Connect to device 0, as soon as it listens."""
    limit = time.monotonic() + LIMIT_S
    with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as stranger:
        stranger.settimeout(LIMIT_S)
        while stranger.connect_ex(mailbox.socket_name(address, 0)):
            assert time.monotonic() < limit, "nobody listens"
            time.sleep(0.001)
        if hello is not None:
            stranger.send(hello)
            assert stranger.recv(10) == b""


@for_each("hello", [None, b"abc", *(struct.pack("<q", number) for number in (0, 9, -1))])
def test_a_stranger_is_shown_out(hello: bytes | None) -> None:
    """One of the same user, who knows the name, and comes before the device."""
    address, shown_out = drawn(), threading.Event()

    def call(rank: int) -> list[bytes]:
        if rank == 1:
            visit(address, hello)
            shown_out.set()
        box = Mailbox(connected(address, rank, 2, LIMIT_S), rank=rank, timeout_s=LIMIT_S)
        try:
            return box.all_gather_bytes(bytes([rank]))
        finally:
            box.close()

    assert together(2, call) == [[b"\0", b"\1"]] * 2
    assert shown_out.is_set()


def test_a_stranger_of_another_user_is_shown_out(monkeypatch: pytest.MonkeyPatch) -> None:
    credentials = mailbox.credentials
    monkeypatch.setattr(mailbox, "credentials", lambda c: (credentials(c)[0], os.getuid() + 1))
    address = drawn()

    def call(rank: int) -> None:
        if rank == 0:
            connected(address, 0, 2, 1.0)
        visit(address, struct.pack("<q", 1))

    error, _ = endings(2, call)
    assert type(error) is PeerTimeout
