"""Who waits in vain finds out for whom."""

from __future__ import annotations

import signal
import subprocess
import threading
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager

import pytest
from torch.distributed import HashStore

from onefold.errors import PeerError, PeerLost, PeerTimeout
from onefold.exchange import connections
from onefold.exchange.collective import GroupTransport
from onefold.exchange.connections import Connections, Lateness, PeerWatch

DEVICES = 3
QUICK_S = 0.02


@pytest.fixture(autouse=True)
def _quick(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(connections, "LOOK_S", QUICK_S)
    monkeypatch.setattr(connections, "ANSWERS_S", 1.0)


@contextmanager
def watched(device: Lateness) -> Iterator[None]:
    """As a process's thread does it."""
    end = threading.Event()

    def watch() -> None:
        while not end.wait(QUICK_S):
            device.look()

    thread = threading.Thread(target=watch)
    thread.start()
    try:
        yield
    finally:
        end.set()
        thread.join()


@pytest.mark.parametrize("late", [[], [0], [2], [1, 2]])
def test_devices_that_do_not_wait_are_late(late: list[int]) -> None:
    store = HashStore()
    devices = [Lateness(store, rank, DEVICES) for rank in range(DEVICES)]
    asking = next(rank for rank in range(DEVICES) if rank not in late)
    with ExitStack() as stack:
        for rank, device in enumerate(devices):
            stack.enter_context(watched(device))
            if rank not in late:
                stack.enter_context(device.waiting())
        assert not devices[asking].is_asked()
        devices[asking].ask()
        devices[asking].answer()
        assert devices[asking].late() == late


def test_who_does_not_wait_any_more_does_not_answer() -> None:
    store = HashStore()
    one, other = (Lateness(store, rank, 2) for rank in range(2))
    with watched(other):
        with other.waiting():
            pass
        one.ask()
        one.answer()
        assert one.late() == [1]


def test_nobody_is_late_because_of_an_answer_at_the_very_end(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The store is looked at once more after the time is over."""
    monkeypatch.setattr(connections, "ANSWERS_S", 0.0)
    store = HashStore()
    one, other = (Lateness(store, rank, 2) for rank in range(2))
    one.ask()
    one.answer()
    other.answer()
    assert one.late() == []


def waiting_device(store: HashStore, rank: int) -> GroupTransport:
    """As much of an exchange as explains an error, in step 7."""
    exchange = object.__new__(GroupTransport)
    exchange.rank, exchange.step, exchange._timeout_s = rank, 7, 600.0
    exchange._store, exchange._lateness = store, Lateness(store, rank, DEVICES)
    exchange._who_left = list
    exchange._watch = PeerWatch({}, Connections(), exchange._lateness)
    return exchange


def test_who_loses_a_connection_as_another_gives_up_names_the_same_device() -> None:
    """A backend that gives up closes its connections, and others wait for it."""
    store = HashStore()
    one, other = (waiting_device(store, rank) for rank in range(2))
    errors: list[PeerError] = []
    lost = threading.Thread(
        target=lambda: errors.append(other._explain(RuntimeError("Connection closed by peer")))
    )
    lost.start()
    errors.append(one._explain(RuntimeError("Timed out waiting 600000ms for recv")))
    lost.join()
    for exchange in (one, other):
        exchange._watch.close()
    assert [type(error) for error in errors] == [PeerTimeout] * 2
    assert all(str(e).startswith("device 2 did not arrive within 600 s in step 7") for e in errors)
    assert [error.device for error in errors] == [2, 2]


def test_a_lost_connection_alone_is_no_late_device() -> None:
    exchange = waiting_device(HashStore(), 0)
    error = exchange._explain(RuntimeError("Connection reset by peer"))
    exchange._watch.close()
    assert type(error) is PeerLost


def test_a_store_that_has_gone_does_not_end_the_watch(monkeypatch: pytest.MonkeyPatch) -> None:
    """Peers that are stopped are noticed all the same."""
    looks: list[int] = []

    class Gone(Lateness):
        def look(self) -> None:
            looks.append(1)
            raise RuntimeError("the store has gone")

    monkeypatch.setattr(connections, "LOOK_S", QUICK_S)
    with subprocess.Popen(["sleep", "60"]) as peer:
        watch = PeerWatch({3: peer.pid}, Connections(), Gone(HashStore(), 0, DEVICES))
        until = time.monotonic() + 20
        while not looks and time.monotonic() < until:
            time.sleep(QUICK_S)
        peer.send_signal(signal.SIGSTOP)
        while watch.stopped is None and time.monotonic() < until:
            time.sleep(QUICK_S)
        peer.kill()
    watch.close()
    assert (watch.stopped, looks) == (3, [1])
