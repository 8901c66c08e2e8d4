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

from onefold.exchange import connections
from onefold.exchange.connections import Connections, Lateness, PeerWatch
from tests.tables import for_each

DEVICES = 3
QUICK_S = 0.02


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


@for_each("late", [[], [0], [2], [1, 2]])
def test_devices_that_do_not_wait_any_more_are_late(
    late: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(connections, "ANSWERS_S", 1.0)
    store = HashStore()
    devices = [Lateness(store, rank, DEVICES) for rank in range(DEVICES)]
    asking = next(rank for rank in range(DEVICES) if rank not in late)
    with ExitStack() as stack:
        for rank, device in enumerate(devices):
            stack.enter_context(watched(device))
            with ExitStack() as wait:
                wait.enter_context(device.waiting())
                if rank not in late:
                    stack.enter_context(wait.pop_all())
        assert not devices[asking].is_asked()
        devices[asking].ask()
        devices[asking].answer()
        assert devices[asking].late() == late


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
