"""Cuts a layout: into pieces, these into a span for each device, and spans into chunks. Pure.

Note: why pieces
----------------
An optimizer kernel is free to treat the tail of a tensor differently from its middle, so the bits
of an update may depend on where a slice begins and ends. If parameters were cut according to the
number of devices, so would the bits be. Therefore every parameter is first cut into *pieces* whose
bounds depend on the model alone: multiples of 1024 elements from the parameter's start. The
optimizer always sees pieces, even on one device, and a *span* is a contiguous run of whole pieces.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import pairwise

from onefold.core.flat import Chunk, Layout, Piece

__all__ = [
    "cut_chunks",
    "cut_pieces",
    "cut_spans",
    "cut_spans_by_stage",
    "cut_spans_in_lines",
]

# Fused kernels give the same bits for any slice cut at a multiple of this: see the note on pieces.
_PIECE_MULTIPLE_NUMEL = 1024
# Smaller pieces would cost the optimizer more in calls of kernels than they even out.
_SMALLEST_PIECE_NUMEL = 16 * 1024
# Enough to give each of many devices an even span, few enough to loop over in every step.
_PIECES_OF_A_MODEL = 256
# What is moved or added at a time still lies in the cache when its next operand arrives.
_CHUNK_BYTES = 4 << 20


def cut_pieces(layout: Layout, *, by_element: bool) -> tuple[Piece, ...]:
    """Cut every entry into pieces, in the order of sections and offsets.

    Args:
        layout: of the parameters.
        by_element: whether an entry may be divided; if not, every piece is whole.
    """
    # Nothing here may depend on the number of devices: see the note on pieces.
    total = sum(entry.numel for entry in layout.entries)
    step = -(-total // (_PIECES_OF_A_MODEL * _PIECE_MULTIPLE_NUMEL)) * _PIECE_MULTIPLE_NUMEL
    step = max(step, _SMALLEST_PIECE_NUMEL)
    # By section: a span then covers few long stretches rather than jumping between dtypes. The sort
    # is stable, so offsets stay in order within a section.
    ordered = sorted(range(len(layout.entries)), key=lambda i: layout.entries[i].section)
    pieces: list[Piece] = []
    for index in ordered:
        numel = layout.entries[index].numel
        if numel <= step or not by_element:
            pieces.append(Piece(index, 0, numel, whole=True))
            continue
        starts = range(0, numel, step)
        pieces.extend(Piece(index, s, min(s + step, numel), whole=False) for s in starts)
    return tuple(pieces)


def cut_spans(pieces: Sequence[Piece], devices: int) -> tuple[range, ...]:
    """Divide the pieces into one row of neighbours for each device, balanced by elements."""
    total = sum(piece.numel for piece in pieces)
    cuts = [0]
    seen = 0
    for index, piece in enumerate(pieces):
        # A piece goes to the device in whose even share of the elements its middle lies, so that a
        # piece across a boundary goes to the device that holds more of it.
        middle = seen + piece.numel / 2
        while len(cuts) < devices and middle >= total * len(cuts) / devices:
            cuts.append(index)
        seen += piece.numel
    # More devices than pieces: the last devices get empty spans, and merely run their shards.
    cuts += [len(pieces)] * (devices + 1 - len(cuts))
    return tuple(range(start, stop) for start, stop in pairwise(cuts))


def cut_spans_by_stage(
    pieces: Sequence[Piece], stage_of: Sequence[int], devices: int
) -> tuple[tuple[int, ...], ...]:
    """Divide the pieces of every stage as `cut_spans` does, so that each device has a part of each.

    Args:
        pieces: of the model.
        stage_of: for each entry, the number of its stage.
        devices: how many there are.
    """
    spans: list[list[int]] = [[] for _ in range(devices)]
    for stage in sorted(set(stage_of)):
        numbers = [n for n, piece in enumerate(pieces) if stage_of[piece.entry] == stage]
        cuts = cut_spans([pieces[number] for number in numbers], devices)
        for span, cut in zip(spans, cuts, strict=True):
            span += [numbers[place] for place in cut]
    return tuple(tuple(sorted(span)) for span in spans)


def cut_spans_in_lines(
    pieces: Sequence[Piece], stage_of: Sequence[int], places: Sequence[int], lines: int
) -> tuple[tuple[int, ...], ...]:
    """Divide the pieces of every stage between the devices that compute it, one in each line.

    Args:
        pieces: of the model.
        stage_of: for each entry, the number of its stage.
        places: for each stage, the place in its line of a device that computes it.
        lines: how many there are.

    Returns:
        For each device, line after line, the numbers of its pieces.
    """
    columns = []
    for place in sorted(set(places)):
        numbers = [n for n, piece in enumerate(pieces) if places[stage_of[piece.entry]] == place]
        spans = cut_spans_by_stage([pieces[number] for number in numbers], stage_of, lines)
        columns.append([tuple(numbers[n] for n in span) for span in spans])
    return tuple(column[line] for line in range(lines) for column in columns)


def cut_chunks(layout: Layout, span: Sequence[Piece]) -> list[Chunk]:
    """The stretches that a span covers, cut small enough for the processor's cache.

    Args:
        layout: which the pieces belong to.
        span: pieces in ascending order, of which some may be left out.
    """
    follows = _neighbours(layout)
    stretches: list[Chunk] = []
    before: Piece | None = None
    joins = False
    for piece in span:
        entry = layout.entries[piece.entry]
        large = piece.entry if layout.is_large(piece.entry) else None
        start, stop = entry.offset + piece.start, entry.offset + piece.stop
        joins = joins and before is not None and follows(before, piece)
        # Neighbours are joined, so that small tensors are added in one kernel, padding included. A
        # large one stays apart from its neighbours: its gradient may lie outside the flat memory.
        if joins and (stretches[-1].section, stretches[-1].entry) == (entry.section, large):
            stretches[-1] = stretches[-1]._replace(stop=stop)
        elif piece.numel:
            stretches.append(Chunk(entry.section, start, stop, large))
            joins = True
        before = piece
    return [part for stretch in stretches for part in _cut(stretch, layout)]


def _neighbours(layout: Layout) -> Callable[[Piece, Piece], bool]:
    """Return whether a piece follows another one, with nothing but padding between them."""
    places, counts = [], [0] * len(layout.dtypes)
    for entry in layout.entries:
        places.append((entry.section, counts[entry.section]))
        counts[entry.section] += 1

    def follows(before: Piece, piece: Piece) -> bool:
        if before.entry == piece.entry:
            return before.stop == piece.start
        section, place = places[before.entry]
        ends = before.stop == layout.entries[before.entry].numel
        return ends and piece.start == 0 and places[piece.entry] == (section, place + 1)

    return follows


def _cut(stretch: Chunk, layout: Layout) -> list[Chunk]:
    step = _CHUNK_BYTES // layout.dtypes[stretch.section].itemsize
    starts = range(stretch.start, stretch.stop, step)
    return [stretch._replace(start=s, stop=min(s + step, stretch.stop)) for s in starts]
