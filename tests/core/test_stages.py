"""Stages of a model: where they lie, who computes them, and in which order."""

from __future__ import annotations

from itertools import combinations, groupby, pairwise

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from onefold.core.flat import lay_out
from onefold.core.stages import (
    ROOT,
    Move,
    StageLayout,
    Stages,
    cut_line,
    in_groups,
    moves,
    waiting,
)
from onefold.core.storage import cut_pieces

NUMELS = st.lists(st.sampled_from([0, 1, 7, 1025, 20_000, 65_536]), min_size=1, max_size=7)
DTYPES = st.sampled_from([torch.float32, torch.float64, torch.bfloat16])

DEVICES = st.integers(1, 6)
SIZES = st.lists(st.integers(0, 20), min_size=1, max_size=9)


@given(stage_of=st.lists(st.integers(0, 3), max_size=9))
def test_every_parameter_is_in_one_stage(stage_of: list[int]) -> None:
    stages = Stages(("root", "a", "b", "c"), tuple(stage_of))
    assert len(stages) == len(stages.entries) == 4
    assert sorted(n for numbers in stages.entries for n in numbers) == list(range(len(stage_of)))
    for stage, numbers in enumerate(stages.entries):
        assert all(stage_of[number] == stage for number in numbers)


@given(sizes=NUMELS, data=st.data())
def test_pieces_of_a_stage_lie_apart_and_aligned(sizes: list[int], data: st.DataObject) -> None:
    tensors = {
        str(n): torch.empty(size, device="meta", dtype=data.draw(DTYPES))
        for n, size in enumerate(sizes)
    }
    stage_of = tuple(data.draw(st.integers(ROOT, 2)) for _ in sizes)
    layout = lay_out(tensors)
    pieces = cut_pieces(layout, by_element=True)
    found = StageLayout(layout, pieces, Stages(("root", "a", "b"), stage_of))
    assert found.nbytes == max(found.stage_bytes)
    assert sorted(n for numbers in found.pieces for n in numbers) == list(range(len(pieces)))
    for stage, numbers in enumerate(found.pieces):
        stop = 0
        for number in numbers:
            start, nbytes, dtype = found.place(number)
            entry = pieces[number].entry
            assert stage_of[entry] == stage
            assert dtype == list(tensors.values())[entry].dtype
            assert nbytes == pieces[number].numel * dtype.itemsize
            assert start >= stop
            assert start % 64 == 0
            stop = start + nbytes
        assert stop <= found.stage_bytes[stage]


# Moves


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
    """Each device does one thing at a time, once its neighbour has done the same."""
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


# Pieces of shards


@given(st.lists(st.integers(1, 5), max_size=8) | st.lists(st.just(1), max_size=8), DEVICES)
def test_a_piece_begins_when_the_one_before_has_been_back(pieces: list[int], devices: int) -> None:
    order = in_groups(pieces, devices)
    wanted = [(shard, piece) for shard, count in enumerate(pieces) for piece in range(count)]
    assert sorted(slot for slot in order if slot is not None) == wanted
    for shard, count in enumerate(pieces):
        places = [order.index((shard, piece)) for piece in range(count)]
        assert all(b - a >= devices for a, b in pairwise(places))
    if set(pieces) == {1}:  # whole shards follow each other without gaps
        full = len(pieces) - len(pieces) % devices
        assert order[:full] == wanted[:full]


# Shares of the stages


@given(SIZES, DEVICES)
def test_the_largest_share_is_as_small_as_can_be(sizes: list[int], devices: int) -> None:
    if devices > len(sizes):
        with pytest.raises(ValueError, match=f"got {len(sizes)} stages and {devices} devices"):
            cut_line(sizes, devices)
        return
    places = cut_line(sizes, devices)
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
