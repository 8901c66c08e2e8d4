"""Where partial sums lie, and how the owner of a span adds them."""

from __future__ import annotations

import torch

from onefold.core.flat import FlatTensors, Layout, Piece, lay_out
from onefold.core.storage import cut_chunks, cut_pieces, cut_spans
from onefold.exchange.spans import SpanTensors
from tests.exchange.together import CPU


def model() -> tuple[Layout, list[list[Piece]]]:
    """A large tensor between two small ones, and the spans of two devices."""
    tensors = {"a": torch.empty(33), "b": torch.empty(300, 400), "c": torch.empty(5, 2)}
    layout = lay_out(tensors)
    pieces = cut_pieces(layout, by_element=True)
    return layout, [[pieces[i] for i in span] for span in cut_spans(pieces, 2)]


def test_span_memory_has_the_size_of_the_span_alone() -> None:
    layout, spans = model()
    flat = FlatTensors(layout)
    for span in spans:
        here, chunks = SpanTensors(layout, span, CPU), cut_chunks(layout, span)
        assert [here.chunk(c).numel() for c in chunks] == [flat.chunk(c).numel() for c in chunks]
        for piece in span:
            assert here.piece(piece).shape == flat.piece(piece).shape
            assert here.piece(piece).stride() == flat.piece(piece).stride()
