"""When a checkpoint is due by time: the lead's clock decides, and all devices hear of one step."""

from __future__ import annotations

import os
from collections.abc import Iterator

import pytest

from onefold.checkpoint import autosave
from onefold.checkpoint.autosave import SaveClock
from onefold.exchange.progress import Progress


@pytest.fixture
def progress() -> Iterator[Progress]:
    descriptor = os.memfd_create("test")
    os.ftruncate(descriptor, Progress.nbytes(2))
    yield Progress(descriptor, 2)
    os.close(descriptor)


def run(progress: Progress, monkeypatch: pytest.MonkeyPatch, every_s: float) -> list[list[int]]:
    """The steps after which each of two devices saves; the lead's step takes a second."""
    now = {"lead": 50.0, "other": 0.0}
    who = ["lead"]
    monkeypatch.setattr(autosave.time, "monotonic", lambda: now[who[0]])
    clocks = {name: SaveClock(progress, every_s, decides=name == "lead") for name in now}
    saved: dict[str, list[int]] = {"lead": [], "other": []}
    for step in range(1, 13):
        for name, clock in clocks.items():  # the lead is ahead, if anybody is
            who[0] = name
            clock.begin_step(step)
        now["lead"] += 1.0
        now["other"] += 100.0
        for name, clock in clocks.items():
            who[0] = name
            if clock.is_due(step):
                saved[name].append(step)
                clock.restart()
    return list(saved.values())


def test_all_devices_save_after_the_same_steps(
    progress: Progress, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert run(progress, monkeypatch, 3.0) == [[4, 8, 12]] * 2


def test_without_a_time_nothing_is_due(progress: Progress, monkeypatch: pytest.MonkeyPatch) -> None:
    assert run(progress, monkeypatch, 0.0) == [[], []]


def test_one_step_is_asked_for_until_it_is_saved(
    progress: Progress, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A device that is behind must find it, however late the checkpoint is written."""
    now = 0.0
    monkeypatch.setattr(autosave.time, "monotonic", lambda: now)
    clock = SaveClock(progress, 5.0, decides=True)
    now = 6.0
    for step in (7, 8, 9):
        clock.begin_step(step)
        assert clock.is_due(7)
    clock.restart()
    clock.begin_step(10)
    assert not clock.is_due(10)
