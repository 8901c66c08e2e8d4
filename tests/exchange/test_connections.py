"""Connections that are cut while their backend closes them."""

import os
import socket
from collections.abc import Iterator

import pytest

from onefold.exchange import connections
from onefold.exchange.connections import Connections, noted_connections

Pair = tuple[socket.socket, socket.socket]


@pytest.fixture
def pair() -> Iterator[Pair]:
    """Two ends of a TCP connection."""
    server = socket.create_server(("127.0.0.1", 0))
    with server, socket.create_connection(server.getsockname()) as one:
        other, _ = server.accept()
        with other:
            yield one, other


def noted(end: socket.socket) -> Connections:
    held = Connections()
    held.sockets = {end.fileno(): os.readlink(f"/proc/self/fd/{end.fileno()}")}
    return held


def test_only_those_that_came_to_be_inside_are_noted(pair: Pair) -> None:
    held = Connections()
    with socket.create_server(("127.0.0.1", 0)) as server, noted_connections(held):
        inside = socket.create_connection(server.getsockname())
    with inside:
        assert list(held.sockets) == [inside.fileno()]


def test_who_waits_at_either_end_hears_of_a_cut(pair: Pair) -> None:
    one, other = pair
    noted(one).cut()
    assert one.recv(1) == b""
    assert other.recv(1) == b""


def test_a_connection_that_its_backend_closes_meanwhile_is_let_be(
    pair: Pair, monkeypatch: pytest.MonkeyPatch
) -> None:
    one, _ = pair
    held = noted(one)

    def close_first(descriptor: int, dup=os.dup) -> int:  # type: ignore[no-untyped-def]
        one.close()
        return dup(descriptor)

    monkeypatch.setattr(connections.os, "dup", close_first)
    held.cut()
    assert held.sockets == {}


def test_a_number_that_has_become_somebody_elses_meanwhile_is_let_be(
    pair: Pair, monkeypatch: pytest.MonkeyPatch
) -> None:
    one, _ = pair
    held = noted(one)
    stranger, end = socket.socketpair()
    with stranger, end:
        dup = os.dup

        def take_its_place(descriptor: int) -> int:
            os.dup2(stranger.fileno(), descriptor)
            return dup(descriptor)

        monkeypatch.setattr(connections.os, "dup", take_its_place)
        held.cut()
        stranger.sendall(b"still open")
        assert end.recv(16) == b"still open"
