"""Stages of a model: where they lie, who computes them, and in which order."""

from itertools import combinations, groupby

import pytest
from hypothesis import given
from hypothesis import strategies as st

from onefold.core.stages import Move, cut_pipeline, merge, moves, waiting

DEVICES = st.integers(1, 6)
SIZES = st.lists(st.integers(0, 20), min_size=1, max_size=9)


@given(DEVICES, st.integers(0, 12))
def test_every_shard_goes_forth_and_back_and_few_are_under_way(devices: int, count: int) -> None:
    for place in range(devices):
        order = list(moves(place, devices, count))
        for move in Move:
            assert [number for m, number in order if m is move] == list(range(count))
        for number in range(count):
            assert order.index((Move.FORTH, number)) < order.index((Move.BACK, number))
        underway = most = 0
        for move, _ in order:
            underway += 1 if move is Move.FORTH else -1
            most = max(most, underway)
        assert most == min(devices - place, count)


@given(DEVICES, st.integers(1, 12))
def test_a_line_ends_after_the_time_that_it_is_said_to_wait(devices: int, count: int) -> None:
    """Each device does one thing at a time, once its neighbor has done the same."""
    orders = [list(moves(place, devices, count)) for place in range(devices)]
    done: dict[tuple[int, Move, int], int] = {}
    free = [0] * devices
    while any(orders):
        before = sum(map(len, orders))
        for place, order in enumerate(orders):
            if not order:
                continue
            move, number = order[0]
            ahead = place - 1 if move is Move.FORTH else place + 1
            needed = (ahead, move, number)
            if 0 <= ahead < devices and needed not in done:
                continue
            start = max(free[place], done.get(needed, 0))
            free[place] = done[place, move, number] = start + 1
            order.pop(0)
        assert sum(map(len, orders)) < before, "they wait for each other"
    assert max(free) == pytest.approx(2 * count * (1 + waiting(devices, count)))


@given(SIZES, DEVICES)
def test_the_largest_share_is_as_small_as_can_be(sizes: list[int], devices: int) -> None:
    if devices > len(sizes):
        with pytest.raises(ValueError, match=f"got {len(sizes)} stages and {devices} devices"):
            cut_pipeline(sizes, devices)
        return
    places = cut_pipeline(sizes, devices)
    assert [place for place, _ in groupby(places)] == list(range(devices))

    def largest(places: tuple[int, ...]) -> int:
        return max(
            sum(size for size, at in zip(sizes, places, strict=True) if at == device)
            for device in range(devices)
        )

    every = [
        tuple(sum(stage >= cut for cut in cuts) for stage in range(len(sizes)))
        for cuts in combinations(range(1, len(sizes)), devices - 1)
    ]
    assert largest(places) == min(map(largest, every))


@given(st.lists(st.integers(0, 1 << 26), max_size=12))
def test_small_neighbors_are_merged(sizes: list[int]) -> None:
    """From the end on; none that is large enough by itself takes another one behind it."""
    stages = merge(sizes)
    assert [stage for stage, _ in groupby(stages)] == list(range(len(set(stages))))
    least = min(sum(sizes) / 8, 16 << 20)
    for stage in set(stages):
        own = [size for size, at in zip(sizes, stages, strict=True) if at == stage]
        assert stage == 0 or sum(own) >= least
        assert sum(own[1:]) < least or len(own) == 1
