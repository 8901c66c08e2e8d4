"""Where partial sums lie, and how the owner of a span adds them."""

from __future__ import annotations

import torch

from onefold.core.flat import FlatTensors, Layout, Piece, lay_out
from onefold.core.storage import cut_chunks, cut_pieces, cut_spans
from onefold.exchange.spans import Partial, SpanTensors
from tests.exchange.together import CPU


def model() -> tuple[Layout, list[list[Piece]]]:
    """A large tensor between two small ones, and the spans of two devices."""
    tensors = {"a": torch.empty(33), "b": torch.empty(300, 400), "c": torch.empty(5, 2)}
    layout = lay_out(tensors)
    pieces = cut_pieces(layout, by_element=True)
    return layout, [[pieces[i] for i in span] for span in cut_spans(pieces, 2)]


def gradients(layout: Layout, value: float) -> list[torch.Tensor | None]:
    return [torch.full(entry.shape, value) for entry in layout.entries]


def test_span_memory_has_the_size_of_the_span_alone() -> None:
    layout, spans = model()
    flat = FlatTensors(layout)
    for span in spans:
        here, chunks = SpanTensors(layout, span, CPU), cut_chunks(layout, span)
        assert [here.chunk(c).numel() for c in chunks] == [flat.chunk(c).numel() for c in chunks]
        for piece in span:
            assert here.piece(piece).shape == flat.piece(piece).shape
            assert here.piece(piece).stride() == flat.piece(piece).stride()


def test_large_gradients_are_copied_only_where_others_see_them_and_let_go() -> None:
    layout, spans = model()
    partial = Partial(FlatTensors(layout))
    partial.show(cut_chunks(layout, spans[1]))
    given = gradients(layout, 1.0)
    partial.write(given)
    flat = partial.flat
    assert flat.views[0].eq(1).all()
    assert flat.views[2].eq(1).all()
    for span, seen in ((spans[0], 0.0), (spans[1], 1.0)):
        for chunk in cut_chunks(layout, span):
            assert partial.chunk(chunk).eq(1).all()
            if chunk.entry is not None:
                assert flat.chunk(chunk).eq(seen).all()
                assert partial.chunk(chunk).untyped_storage().data_ptr() == given[1].data_ptr()  # type: ignore[union-attr]
    partial.release()
    large = next(chunk for chunk in cut_chunks(layout, spans[0]) if chunk.entry is not None)
    assert partial.chunk(large).eq(0).all()
    partial.write([None, None, None])
    assert all(view.eq(0).all() for view in flat.views)
