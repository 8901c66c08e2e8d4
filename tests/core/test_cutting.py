"""Pieces, spans and chunks of a layout."""

from __future__ import annotations

import torch
from hypothesis import given
from hypothesis import strategies as st

from onefold.core.flat import lay_out
from onefold.core.storage import (
    cut_chunks,
    cut_pieces,
    cut_spans,
    cut_spans_by_stage,
    cut_spans_in_lines,
)
from tests.tables import for_each

SHAPES = st.lists(st.lists(st.integers(0, 300), min_size=0, max_size=2), min_size=1, max_size=12)
DTYPES = [torch.float32, torch.bfloat16, torch.float64]


@given(shapes=SHAPES, by_element=st.booleans(), devices=st.integers(1, 9), data=st.data())
def test_spans_cover_every_element_once_and_are_aligned(
    shapes: list[list[int]], by_element: bool, devices: int, data: st.DataObject
) -> None:
    tensors = {
        str(i): torch.empty(shape, dtype=data.draw(st.sampled_from(DTYPES)))
        for i, shape in enumerate(shapes)
    }
    layout = lay_out(tensors)
    pieces = cut_pieces(layout, by_element=by_element)
    spans = cut_spans(pieces, devices)
    assert [i for span in spans for i in span] == list(range(len(pieces)))
    seen = {i: torch.zeros(t.numel(), dtype=torch.int) for i, t in enumerate(tensors.values())}
    for piece in pieces:
        seen[piece.entry][piece.start : piece.stop] += 1
        assert piece.start % 1024 == 0
        assert piece.stop % 1024 == 0 or piece.stop == layout.entries[piece.entry].numel
        assert piece.whole or by_element
    assert all(bool((count == 1).all()) for count in seen.values())
    for entry in layout.entries:
        assert entry.offset * layout.dtypes[entry.section].itemsize % 256 == 0


@given(
    numels=st.lists(st.integers(1, 2_000_000), min_size=1, max_size=20), devices=st.integers(1, 8)
)
def test_spans_are_balanced(numels: list[int], devices: int) -> None:
    layout = lay_out({str(i): torch.empty(n, device="meta") for i, n in enumerate(numels)})
    pieces = cut_pieces(layout, by_element=True)
    total, largest = sum(numels), max(piece.numel for piece in pieces)
    for span in cut_spans(pieces, devices):
        assert sum(pieces[i].numel for i in span) <= total / devices + largest


def test_pieces_do_not_depend_on_the_number_of_devices_but_on_the_model() -> None:
    layout = lay_out({"w": torch.empty(26_000_000, device="meta")})
    pieces = cut_pieces(layout, by_element=True)
    assert 200 <= len(pieces) <= 256
    assert not any(piece.whole for piece in pieces)


@for_each("devices", [1, 2, 5])
def test_more_devices_than_pieces_leave_some_without_a_span(devices: int) -> None:
    pieces = cut_pieces(lay_out({"a": torch.empty(3)}), by_element=True)
    assert sum(len(span) for span in cut_spans(pieces, devices)) == 1


SIZES = st.lists(st.sampled_from([0, 1, 7, 20_000, 65_535, 65_536, 300_000, 700_001]), max_size=7)


@given(sizes=SIZES, devices=st.integers(1, 5))
def test_chunks_cover_every_span_once_and_none_is_of_two_large_tensors(
    sizes: list[int], devices: int
) -> None:
    tensors = {str(n): torch.empty(size, device="meta") for n, size in enumerate(sizes)}
    layout = lay_out(tensors)
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
    layout = lay_out({str(n): torch.empty(size, device="meta") for n, size in enumerate(sizes)})
    pieces = cut_pieces(layout, by_element=True)
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
    dtypes = st.sampled_from(DTYPES)
    layout = lay_out(
        {
            str(n): torch.empty(size, device="meta", dtype=data.draw(dtypes))
            for n, size in enumerate(sizes)
        }
    )
    pieces = cut_pieces(layout, by_element=True)
    stage_of = [data.draw(st.integers(0, 3)) for _ in sizes]
    spans = cut_spans_by_stage(pieces, stage_of, devices)
    assert sorted(n for span in spans for n in span) == list(range(len(pieces)))
    for stage in set(stage_of):
        own = [p for p in pieces if stage_of[p.entry] == stage]
        largest = max((p.numel for p in own), default=0)
        for span in spans:
            part = sum(pieces[n].numel for n in span if stage_of[pieces[n].entry] == stage)
            assert part <= sum(p.numel for p in own) / devices + largest
    covered = [0] * len(layout.dtypes)
    owned: list[set[tuple[int, int]]] = [set() for _ in spans]
    for number, span in enumerate(spans):
        for chunk in cut_chunks(layout, [pieces[i] for i in span]):
            assert (chunk.section, chunk.start) not in owned[number]
            owned[number].add((chunk.section, chunk.start))
            covered[chunk.section] += chunk.stop - chunk.start
            # Only this span's own elements, and padding, which belongs to nobody.
            for other, theirs in enumerate(spans):
                for piece in (pieces[n] for n in theirs if other != number):
                    entry = layout.entries[piece.entry]
                    start, stop = entry.offset + piece.start, entry.offset + piece.stop
                    apart = chunk.stop <= start or stop <= chunk.start or start == stop
                    assert entry.section != chunk.section or apart
    assert sum(sizes) <= sum(covered) <= sum(layout.numels)
