from __future__ import annotations

import torch
from hypothesis import given
from hypothesis import strategies as st

from onefold.core.flat import lay_out
from onefold.core.stages import ROOT, StageLayout, Stages
from onefold.core.storage import cut_pieces

SIZES = st.lists(st.sampled_from([0, 1, 7, 1025, 20_000, 65_536]), min_size=1, max_size=7)
DTYPES = st.sampled_from([torch.float32, torch.float64, torch.bfloat16])


@given(stage_of=st.lists(st.integers(0, 3), max_size=9))
def test_every_parameter_is_in_one_stage(stage_of: list[int]) -> None:
    stages = Stages(("root", "a", "b", "c"), tuple(stage_of))
    assert len(stages) == len(stages.entries) == 4
    assert sorted(n for numbers in stages.entries for n in numbers) == list(range(len(stage_of)))
    for stage, numbers in enumerate(stages.entries):
        assert all(stage_of[number] == stage for number in numbers)


@given(sizes=SIZES, data=st.data())
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
