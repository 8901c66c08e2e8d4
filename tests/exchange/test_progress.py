"""The table in which a launcher sees where its workers are, and they what it asks."""

from __future__ import annotations

import os
from collections.abc import Iterator

import pytest

from onefold.core.world import World
from onefold.exchange import progress
from onefold.exchange.progress import Progress, progress_of

DEVICES = 3


@pytest.fixture
def descriptor() -> Iterator[int]:
    made = os.memfd_create("test")
    os.ftruncate(made, Progress.nbytes(DEVICES))
    yield made
    os.close(made)


@pytest.fixture
def table(descriptor: int) -> Progress:
    return Progress(descriptor, DEVICES)


def steps(table: Progress) -> list[int]:
    return [table.step_of(rank) for rank in range(DEVICES)]


def ended(table: Progress) -> list[bool]:
    return [table.has_ended(rank) for rank in range(DEVICES)]


def test_a_new_table_says_that_nobody_has_begun(table: Progress) -> None:
    assert steps(table) == [-1, -1, -1]
    assert ended(table) == [False, False, False]
    assert not table.stop_requested()


def test_step_0_is_a_step(table: Progress) -> None:
    table.set_step(1, 0)
    assert steps(table) == [-1, 0, -1]


@pytest.mark.parametrize("step", [0, 12, 2**62])
def test_who_has_ended_was_last_seen_in_its_step(table: Progress, step: int) -> None:
    table.set_step(1, step)
    table.set_ended(1)
    assert ended(table) == [False, True, False]
    assert steps(table) == [-1, step, -1]


def test_who_has_ended_before_any_step_was_in_none(table: Progress) -> None:
    table.set_ended(2)
    assert ended(table) == [False, False, True]
    assert steps(table) == [-1, -1, -1]


def test_a_request_to_stop_touches_no_row(table: Progress) -> None:
    for rank in range(DEVICES):
        table.set_step(rank, 4)
    assert not table.stop_requested()
    table.request_stop()
    assert table.stop_requested()
    assert steps(table) == [4, 4, 4]
    assert ended(table) == [False, False, False]


def test_memory_that_is_too_small_is_refused(descriptor: int) -> None:
    with pytest.raises(ValueError, match="length is greater than file size"):
        Progress(descriptor, DEVICES + 1)


def test_who_was_started_by_nobody_has_no_table() -> None:
    assert progress_of(World()) is None


def test_a_worker_finds_the_table_though_its_script_has_closed_the_file(descriptor: int) -> None:
    own = os.dup(descriptor)
    progress._table.cache_clear()
    world = World(rank=1, size=DEVICES, progress_descriptor=own)
    found = progress_of(world)
    os.close(own)
    assert found is not None
    assert progress_of(world) is found
    found.set_step(1, 9)
    assert Progress(descriptor, DEVICES).step_of(1) == 9
    progress._table.cache_clear()


def test_the_lead_asks_all_devices_to_save_after_one_step(descriptor: int) -> None:
    lead, other = (Progress(descriptor, DEVICES) for _ in range(2))
    assert not other.saves_after(1)
    lead.save_after(4)
    other.request_stop()
    assert [other.saves_after(step) for step in (3, 4, 5)] == [False, True, False]
    assert lead.stop_requested()
    assert [lead.step_of(rank) for rank in range(DEVICES)] == [-1] * DEVICES
