"""The table in which a launcher sees where its workers are, and they what it asks."""

from __future__ import annotations

import os
from collections.abc import Iterator

import pytest

from onefold.exchange.progress import Progress

DEVICES = 3


@pytest.fixture
def descriptor() -> Iterator[int]:
    made = os.memfd_create("test")
    os.ftruncate(made, Progress.nbytes(DEVICES))
    yield made
    os.close(made)


def seen(table: Progress) -> tuple[list[int], list[bool], bool]:
    ranks = range(DEVICES)
    ended = [table.has_ended(rank) for rank in ranks]
    return [table.step_of(rank) for rank in ranks], ended, table.stop_requested()


def test_everybody_sees_what_one_has_noted(descriptor: int) -> None:
    launcher, worker = (Progress(descriptor, DEVICES) for _ in range(2))
    assert seen(launcher) == ([-1, -1, -1], [False] * 3, False)
    worker.set_step(1, 0)
    worker.set_step(2, 2**62)
    assert seen(launcher) == ([-1, 0, 2**62], [False] * 3, False)
    worker.set_ended(0)
    worker.set_ended(2)
    assert seen(launcher) == ([-1, 0, 2**62], [True, False, True], False)
    assert not worker.saves_after(1)
    launcher.save_after(4)
    launcher.request_stop()
    assert [worker.saves_after(step) for step in (3, 4, 5)] == [False, True, False]
    assert seen(worker) == ([-1, 0, 2**62], [True, False, True], True)
    with pytest.raises(ValueError, match="length is greater than file size"):
        Progress(descriptor, DEVICES + 1)
