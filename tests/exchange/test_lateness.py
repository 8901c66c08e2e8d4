"""Who waits in vain finds out for whom."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager

import pytest
from torch.distributed import HashStore

from onefold.exchange import lateness
from onefold.exchange.lateness import Lateness

DEVICES = 3
QUICK_S = 0.02


@pytest.fixture(autouse=True)
def _quick(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(lateness, "LOOK_S", QUICK_S)
    monkeypatch.setattr(lateness, "ANSWERS_S", 1.0)


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
        devices[asking].answer()
        devices[asking].ask()
        assert devices[asking].late() == late


def test_who_does_not_wait_any_more_does_not_answer() -> None:
    store = HashStore()
    one, other = (Lateness(store, rank, 2) for rank in range(2))
    with watched(other):
        with other.waiting():
            pass
        one.answer()
        one.ask()
        assert one.late() == [1]


def test_nobody_is_late_because_of_an_answer_at_the_very_end(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The store is looked at once more after the time is over."""
    monkeypatch.setattr(lateness, "ANSWERS_S", 0.0)
    store = HashStore()
    one, other = (Lateness(store, rank, 2) for rank in range(2))
    one.answer()
    other.answer()
    one.ask()
    assert one.late() == []
