from __future__ import annotations

from itertools import pairwise

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from onefold.core.shard import Plan, cut_bounds, runs_of
from tests.tables import for_each


@given(samples=st.integers(0, 500), shards=st.integers(1, 70))
def test_shards_are_cut_as_tensor_split_does(samples: int, shards: int) -> None:
    parts = torch.tensor_split(torch.arange(samples), shards)
    assert [stop - start for start, stop in cut_bounds(samples, shards)] == [len(p) for p in parts]
    assert [i for start, stop in cut_bounds(samples, shards) for i in range(start, stop)] == list(
        range(samples)
    )


@given(shards=st.integers(1, 70), data=st.data())
def test_an_even_plan_gives_each_device_a_share(shards: int, data: st.DataObject) -> None:
    devices = data.draw(st.integers(1, shards))
    plan = Plan.even(shards=shards, devices=devices)
    assert plan.shards == shards
    assert plan.devices == devices
    assert max(plan.counts) - min(plan.counts) <= 1
    assert [s for d in range(devices) for s in plan.shards_of(d)] == list(range(shards))


def test_more_devices_than_shards_are_refused() -> None:
    with pytest.raises(ValueError, match="3 devices cannot share 2 shards"):
        Plan.even(shards=2, devices=3)


@for_each("counts", [(), (0, 0), (2, -1)])
def test_a_plan_without_shards_is_refused(counts: tuple[int, ...]) -> None:
    with pytest.raises(ValueError, match="zero or more shards"):
        Plan(counts)


def test_a_given_plan_must_fit_the_run() -> None:
    with pytest.raises(ValueError, match="this run has 2 devices and 5 shards"):
        Plan.given((2, 2), shards=5, devices=2)
    assert Plan.given([0, 5], shards=5, devices=2).shards_of(1) == range(5)


COUNTS = st.lists(st.integers(0, 9), min_size=1, max_size=6).filter(any).map(tuple)


@given(counts=COUNTS, in_rounds=st.booleans())
def test_rounds_hold_every_shard_once_and_each_device_at_most_once(
    counts: tuple[int, ...], in_rounds: bool
) -> None:
    plan = Plan(counts, in_rounds=in_rounds)
    rows = plan.rounds()
    assert len(rows) == max(counts)
    for device in range(plan.devices):
        own = [row[device] for row in rows if device in row]
        assert own == list(plan.shards_of(device)) == sorted(own)
        assert len(own) == counts[device]
    assert sorted(s for row in rows for s in row.values()) == list(range(plan.shards))
    if in_rounds:
        assert [s for row in rows for s in row.values()] == list(range(plan.shards))
    assert plan.in_a_row() == Plan(counts)


@given(numbers=st.sets(st.integers(0, 40)))
def test_runs_are_rows_of_neighbours(numbers: set[int]) -> None:
    runs = runs_of(tuple(sorted(numbers)))
    assert [n for run in runs for n in range(run.start, run.stop)] == sorted(numbers)
    assert all(a.stop < b.start for a, b in pairwise(runs))
