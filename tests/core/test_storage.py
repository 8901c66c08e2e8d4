"""How parameters are cut into pieces, spans and chunks, and sizes that all devices have alike."""

from __future__ import annotations

import dataclasses

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from onefold.core.flat import Layout, lay_out
from onefold.core.fold import blocks_of
from onefold.core.precision import added_up_in
from onefold.core.storage import (
    BoardShape,
    Storage,
    cut_chunks,
    cut_pieces,
    cut_spans,
    cut_spans_by_stage,
    cut_spans_in_lines,
)
from onefold.exchange.board import Board
from tests.tables import for_each

DTYPES = st.sampled_from([torch.float32, torch.bfloat16, torch.float64])
SIZES = st.lists(st.sampled_from([0, 1, 7, 20_000, 65_535, 65_536, 300_000, 700_001]), max_size=7)


def layout_of(*sizes: int, dtypes: list[torch.dtype] | None = None) -> Layout:
    kinds = dtypes or [torch.float32] * len(sizes)
    return lay_out(
        {
            str(n): torch.empty(size, device="meta", dtype=dtype)
            for n, (size, dtype) in enumerate(zip(sizes, kinds, strict=True))
        }
    )


@given(
    sizes=st.lists(st.integers(0, 90_000), min_size=1, max_size=12),
    by_element=st.booleans(),
    devices=st.integers(1, 9),
    data=st.data(),
)
def test_spans_cover_every_element_once_aligned_and_balanced(
    sizes: list[int], by_element: bool, devices: int, data: st.DataObject
) -> None:
    layout = layout_of(*sizes, dtypes=[data.draw(DTYPES) for _ in sizes])
    pieces = cut_pieces(layout, by_element=by_element)
    spans = cut_spans(pieces, devices)
    assert [i for span in spans for i in span] == list(range(len(pieces)))
    ends = [0] * len(sizes)
    for piece in pieces:
        assert piece.start == ends[piece.entry]
        ends[piece.entry] = piece.stop
        assert piece.start % 1024 == 0
        assert piece.stop % 1024 == 0 or piece.stop == sizes[piece.entry]
        assert piece.whole or by_element
    assert ends == sizes
    for entry in layout.entries:
        assert entry.offset * layout.dtypes[entry.section].itemsize % 256 == 0
    largest = max((piece.numel for piece in pieces), default=0)
    for span in spans:
        assert sum(pieces[i].numel for i in span) <= sum(sizes) / devices + largest


def test_pieces_do_not_depend_on_the_number_of_devices_but_on_the_model() -> None:
    pieces = cut_pieces(layout_of(26_000_000), by_element=True)
    assert 200 <= len(pieces) <= 256
    assert not any(piece.whole for piece in pieces)
    (piece,) = cut_pieces(layout_of(3), by_element=True)
    assert sorted(map(len, cut_spans([piece], 5))) == [0, 0, 0, 0, 1]


@given(sizes=SIZES, devices=st.integers(1, 5))
def test_chunks_cover_every_span_once_and_none_is_of_two_large_tensors(
    sizes: list[int], devices: int
) -> None:
    layout = layout_of(*sizes)
    pieces = cut_pieces(layout, by_element=True)
    covered: list[int] = []
    for span in cut_spans(pieces, devices):
        for chunk in cut_chunks(layout, [pieces[i] for i in span]):
            assert 0 < (chunk.stop - chunk.start) * 4 <= 4 << 20
            inside = [
                number
                for number, entry in enumerate(layout.entries)
                if entry.offset < chunk.stop and chunk.start < entry.offset + entry.numel
            ]
            large = [number for number in inside if layout.is_large(number)]
            assert large == ([] if chunk.entry is None else [chunk.entry])
            assert not large or inside == large
            covered += [chunk.start, chunk.stop]
    assert covered == sorted(covered)
    elements = sum(b - a for a, b in zip(covered[::2], covered[1::2], strict=True))
    assert sum(sizes) <= elements <= sum(layout.numels)


@given(sizes=SIZES, lines=st.integers(1, 4), line=st.integers(1, 3), data=st.data())
def test_a_stage_is_divided_between_the_devices_that_compute_it(
    sizes: list[int], lines: int, line: int, data: st.DataObject
) -> None:
    pieces = cut_pieces(layout_of(*sizes), by_element=True)
    stage_of = [data.draw(st.integers(0, line)) for _ in sizes]
    places = (0, *range(line))
    spans = cut_spans_in_lines(pieces, stage_of, places, lines)
    assert len(spans) == lines * line
    assert sorted(n for span in spans for n in span) == list(range(len(pieces)))
    for device, span in enumerate(spans):
        assert list(span) == sorted(span)
        assert {places[stage_of[pieces[n].entry]] for n in span} <= {device % line}
    for place in range(line):
        own = [p.numel for p in pieces if places[stage_of[p.entry]] == place]
        parts = [sum(pieces[n].numel for n in span) for span in spans[place::line]]
        # Each stage of the place is cut by itself.
        assert max(parts) <= sum(own) / lines + 2 * max(own, default=0)


@given(sizes=SIZES, devices=st.integers(1, 5), data=st.data())
def test_each_stage_is_divided_by_itself(
    sizes: list[int], devices: int, data: st.DataObject
) -> None:
    layout = layout_of(*sizes, dtypes=[data.draw(DTYPES) for _ in sizes])
    pieces = cut_pieces(layout, by_element=True)
    stage_of = [data.draw(st.integers(0, 3)) for _ in sizes]
    spans = cut_spans_by_stage(pieces, stage_of, devices)
    assert sorted(n for span in spans for n in span) == list(range(len(pieces)))
    for stage in set(stage_of):
        own = [p.numel for p in pieces if stage_of[p.entry] == stage]
        for span in spans:
            part = sum(pieces[n].numel for n in span if stage_of[pieces[n].entry] == stage)
            assert part <= sum(own) / devices + max(own, default=0)
    covered = 0
    for number, span in enumerate(spans):
        chunks = list(cut_chunks(layout, [pieces[i] for i in span]))
        assert len({(chunk.section, chunk.start) for chunk in chunks}) == len(chunks)
        covered += sum(chunk.stop - chunk.start for chunk in chunks)
        # Only this span's own elements, and padding, which belongs to nobody.
        others = [pieces[n] for other, own in enumerate(spans) if other != number for n in own]
        for piece in others:
            entry = layout.entries[piece.entry]
            start, stop = entry.offset + piece.start, entry.offset + piece.stop
            for chunk in chunks:
                apart = chunk.stop <= start or stop <= chunk.start or start == stop
                assert entry.section != chunk.section or apart
    assert sum(sizes) <= covered <= sum(layout.numels)


# Sizes


def storage(*, shards: int, devices: int) -> Storage:
    trained = lay_out({"weight": torch.zeros(5, 3), "half": torch.zeros(7, dtype=torch.bfloat16)})
    buffers = {"mean": torch.zeros(3), "count": torch.zeros((), dtype=torch.int64)}
    return Storage.alike(
        trained,
        other=lay_out({"frozen": torch.zeros(4)}),
        buffers=lay_out(buffers),
        pieces=cut_pieces(trained, by_element=True),
        shards=shards,
        devices=devices,
    )


def test_gradients_and_masters_of_low_precision_may_be_wider() -> None:
    made = storage(shards=4, devices=2)
    assert made.parameters is made.masters
    assert made.parameters.dtypes == (torch.float32, torch.bfloat16)
    assert made.gradients.dtypes == (torch.float32, torch.float32)
    assert not made.rounds
    assert made.with_masters(None) == made
    wide = made.with_masters(torch.float32)
    assert wide.rounds
    assert wide.masters.dtypes == (torch.float32, torch.float32)
    assert wide.masters.entries == made.gradients.entries == made.parameters.entries
    full = dataclasses.replace(made.parameters, dtypes=(torch.float32, torch.float64))
    assert full.converted(added_up_in) is full
    with pytest.raises(ValueError, match="as wide as"):
        made.parameters.converted(lambda _: torch.float16)


@given(shards=st.integers(2, 200), data=st.data())
def test_there_is_a_slot_for_each_block_of_any_plan(shards: int, data: st.DataObject) -> None:
    start = data.draw(st.integers(0, shards))
    stop = data.draw(st.integers(start, shards))
    assert len(blocks_of(range(start, stop), shards)) <= storage(shards=shards, devices=2).slots


def test_no_more_slots_than_some_plan_needs() -> None:
    assert [storage(shards=v, devices=1).slots for v in (1, 2, 7, 64)] == [1, 1, 1, 1]
    most = max(len(blocks_of(range(a, b), 16)) for a in range(16) for b in range(a, 17))
    assert storage(shards=16, devices=3).slots == most


@for_each(("shards", "devices"), [(1, 1), (4, 2), (65, 64)])
def test_a_board_of_these_sizes_has_room_for_every_row(shards: int, devices: int) -> None:
    shape = storage(shards=shards, devices=devices).board
    assert shape == BoardShape(devices, shards, 2, shape.buffers)
    assert all(nbytes % 64 == 0 for nbytes in (*shape.host_bytes, shape.device_bytes))
    board = Board.private(shape, torch.device("cpu"))
    assert board.weights.shape == board.totals.shape == (shards,)
    assert (board.gave.shape, board.changed.shape) == ((devices, 2), (shards, 2))
    board.weights[:] = board.gave[:] = board.changed[:] = 1
    # 1.0 has two bytes.
    assert int(board.known.count_nonzero()) == shards * 2 + devices * 2 + shards * 2
    board.totals.fill_(7.0)
    for number, row in enumerate(board.buffer_rows):
        row.views[0].fill_(number + 1.0)
        row.views[1].fill_(-1)
    assert board.totals.tolist() == [7.0] * shards
    rows = [row.views[0].tolist() for row in board.buffer_rows]
    assert rows == [[n + 1.0] * 3 for n in range(shards)]


def test_a_model_without_buffers_has_an_empty_row() -> None:
    shape = BoardShape(2, 4, 3, lay_out({}))
    assert Board.private(shape, torch.device("cpu")).changed.shape == (4, 0)
