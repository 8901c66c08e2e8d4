"""Connections that are cut while their backend closes them."""

import os
import socket
import subprocess
import sys
from collections.abc import Iterator

import pytest

from onefold.exchange import connections
from onefold.exchange.connections import Connections, noted_connections


@pytest.fixture
def pair() -> Iterator[tuple[socket.socket, socket.socket, Connections]]:
    """Two ends of a TCP connection, of which the first is noted."""
    held = Connections()
    with socket.create_server(("127.0.0.1", 0)) as server:
        before = socket.create_connection(server.getsockname())
        server.accept()[0].close()
        with noted_connections(held):
            one = socket.create_connection(server.getsockname())
        with before, one, server.accept()[0] as other:
            yield one, other, held


Pair = tuple[socket.socket, socket.socket, Connections]


def test_who_waits_at_either_end_hears_of_a_cut(pair: Pair) -> None:
    one, other, held = pair
    assert list(held.sockets) == [one.fileno()]
    held.cut()
    assert one.recv(1) == b""
    assert other.recv(1) == b""


def test_a_number_of_somebody_else_is_let_be(pair: Pair, monkeypatch: pytest.MonkeyPatch) -> None:
    one, _, held = pair
    noted, dup = dict(held.sockets), os.dup
    stranger, end = socket.socketpair()
    with stranger, end:

        def take_its_place(descriptor: int) -> int:
            os.dup2(stranger.fileno(), descriptor)
            return dup(descriptor)

        def close_first(descriptor: int) -> int:
            one.close()
            return dup(descriptor)

        for meanwhile in (take_its_place, close_first):
            held.sockets = dict(noted)
            monkeypatch.setattr(connections.os, "dup", meanwhile)
            held.cut()
            assert held.sockets == {}
            stranger.sendall(b"still open")
            assert end.recv(16) == b"still open"


SLOW = """
import sys, threading, time
from torch.distributed import TCPStore
from onefold.exchange.connections import Connections, LateWatch, PeerWatch

class Slow(LateWatch):
    def answer_peers(self):
        inside.set()
        limit = time.monotonic() + 1
        while time.monotonic() < limit:
            store.check(["key"])

inside = threading.Event()
store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
watch = PeerWatch({}, Connections(), Slow(store, 0, 1))
inside.wait()
if "close" in sys.argv:
    watch.close()
if "fail" in sys.argv:
    raise SystemExit(3)
"""
"""The thread comes and goes between Python and PyTorch when the script ends."""


@pytest.mark.parametrize(("how", "code"), [("leave open", 0), ("close", 0), ("fail", 3)])
def test_a_watch_does_not_abort_a_process_that_ends(how: str, code: int) -> None:
    done = subprocess.run([sys.executable, "-c", SLOW, how], capture_output=True, text=True)
    assert done.returncode == code, done.stderr
