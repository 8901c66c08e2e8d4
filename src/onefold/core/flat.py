"""Packs many tensors into a few flat ones, and cuts those into pieces, spans and chunks.

Note: why pieces
----------------
An optimizer kernel is free to treat the tail of a tensor differently from its middle, so the bits
of an update may depend on where a slice begins and ends. If parameters were cut according to the
number of devices, so would the bits be. Therefore every parameter is first cut into *pieces* whose
bounds depend on the model alone: multiples of 1024 elements from the parameter's start. The
optimizer always sees pieces, even on one device, and a *span* is a contiguous run of whole pieces.
Every parameter starts at a multiple of 64 bytes, whatever lies before it, because a vectorised
kernel may treat the elements up to the first aligned address separately, too.

Note: who owns the memory
-------------------------
A section is a view of memory that somebody else allocated, perhaps shared with other processes. A
view of an entry, a piece or a chunk aliases its section: writing to one writes to all of them, and
in-place additions rely on that. The layout is computed from names, shapes, dtypes and strides
alone, so that every process finds a tensor at the same offset without asking the others.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import NamedTuple

import torch
from torch.utils.dlpack import from_dlpack, to_dlpack  # type: ignore[attr-defined]

from onefold.system.compat import copy_each

__all__ = [
    "Chunk",
    "Entry",
    "FlatTensors",
    "Layout",
    "Piece",
    "aligned",
    "cut_chunks",
    "cut_pieces",
    "cut_spans",
    "cut_spans_by_stage",
    "cut_spans_in_lines",
    "extent",
    "laid_out",
    "lay_out",
    "same_bits",
    "storage_order",
]

# A cache line, and the widest vector register of today's processors.
_ALIGNMENT_BYTES = 64
# Fused kernels give the same bits for any slice cut at a multiple of this: see the note on pieces.
_PIECE_MULTIPLE_NUMEL = 1024
# Smaller pieces would cost the optimizer more in calls of kernels than they even out.
_SMALLEST_PIECE_NUMEL = 16 * 1024
# Enough to give each of many devices an even span, few enough to loop over in every step.
_PIECES_OF_A_MODEL = 256
# From this size on a tensor is added where it lies: copying it would cost as much as adding it.
_LARGE_BYTES = 256 << 10
# What is moved or added at a time still lies in the cache when its next operand arrives.
_CHUNK_BYTES = 4 << 20


@dataclass(frozen=True, slots=True)
class Entry:
    """Where one tensor lies."""

    name: str
    section: int
    """Number of the flat tensor that it lies in; there is one for each dtype."""
    offset: int
    """Its first element, counted from the start of the section."""
    shape: tuple[int, ...]
    stride: tuple[int, ...]
    """The tensor's own strides, so that channels_last stays channels_last."""
    numel: int


@dataclass(frozen=True, slots=True)
class Layout:
    """Where each tensor of a set lies; the same on every device."""

    entries: tuple[Entry, ...]
    dtypes: tuple[torch.dtype, ...]
    """The dtype of each section."""
    numels: tuple[int, ...]
    """Number of elements in each section, padding included."""

    @property
    def section_bytes(self) -> tuple[int, ...]:
        """Bytes of each section, rounded up to the alignment."""
        pairs = zip(self.numels, self.dtypes, strict=True)
        return tuple(_round_up(n * dtype.itemsize, _ALIGNMENT_BYTES) for n, dtype in pairs)

    @property
    def nbytes(self) -> int:
        """Bytes of all sections."""
        return sum(self.section_bytes)

    def converted(self, convert: Callable[[torch.dtype], torch.dtype]) -> Layout:
        """The same entries at the same elements, in other dtypes that are not narrower."""
        # Offsets count elements: aligned for a narrow dtype, they are so for any wider one.
        dtypes = tuple(map(convert, self.dtypes))
        if dtypes == self.dtypes:
            return self
        if any(new.itemsize < old.itemsize for new, old in zip(dtypes, self.dtypes, strict=True)):
            raise ValueError(f"expected dtypes as wide as {self.dtypes} or wider, got {dtypes}")
        return replace(self, dtypes=dtypes)

    def dtype_of(self, number: int) -> torch.dtype:
        """The dtype of an entry."""
        return self.dtypes[self.entries[number].section]

    def is_large(self, number: int) -> bool:
        """Whether an entry is large enough to be treated alone rather than with its neighbours."""
        return self.entries[number].numel * self.dtype_of(number).itemsize >= _LARGE_BYTES


@dataclass(frozen=True, slots=True)
class Piece:
    """Elements ``start`` to ``stop - 1`` of one entry, in storage order."""

    entry: int
    start: int
    stop: int
    whole: bool
    """Whether it is the entire entry, which is then updated in the entry's own shape."""

    @property
    def numel(self) -> int:
        """Number of elements."""
        return self.stop - self.start


class Chunk(NamedTuple):
    """Elements ``start`` to ``stop - 1`` of a section, which are moved or added at a time."""

    section: int
    start: int
    stop: int
    entry: int | None
    """Number of the large entry that it lies in; None if it lies among small ones."""


def lay_out(tensors: Mapping[str, torch.Tensor]) -> Layout:
    """Find a place for each tensor, in the order given, one section for each dtype."""
    # In the order of first appearance, which is the model's and so the same in every process; a set
    # would have an order of its own in each.
    dtypes = tuple(dict.fromkeys(tensor.dtype for tensor in tensors.values()))
    filled = dict.fromkeys(dtypes, 0)
    entries = []
    for name, tensor in tensors.items():
        alignment_numel = max(1, _ALIGNMENT_BYTES // tensor.dtype.itemsize)
        entries.append(
            Entry(
                name=name,
                section=dtypes.index(tensor.dtype),
                offset=filled[tensor.dtype],
                shape=tuple(tensor.shape),
                stride=_dense_stride(tensor),
                numel=tensor.numel(),
            )
        )
        filled[tensor.dtype] += _round_up(tensor.numel(), alignment_numel)
    return Layout(tuple(entries), dtypes, tuple(filled.values()))


class FlatTensors:
    """The sections of a layout in one stretch of memory, and a view of every entry.

    Args:
        layout: where each tensor lies.
        memory: (layout.nbytes,) uint8, starting at a multiple of 64 bytes; if absent, zeros are
            allocated on ``device``.
        device: where to allocate them.
        there: whether there is memory from the beginning; see `get_back`.
    """

    def __init__(
        self,
        layout: Layout,
        *,
        memory: torch.Tensor | None = None,
        device: torch.device | None = None,
        there: bool = True,
    ) -> None:
        if memory is None:
            memory = torch.zeros(layout.nbytes * there, dtype=torch.uint8, device=device)
        self.layout = layout
        self.device = memory.device
        if there:
            self._fill(memory)
        else:
            self.let_go()

    def _fill(self, memory: torch.Tensor) -> None:
        # One flat tensor for each dtype, (numel,): views of `memory`, which they keep alive.
        self.sections: list[torch.Tensor] = []
        start = 0
        layout = self.layout
        for nbytes, numel, dtype in zip(
            layout.section_bytes, layout.numels, layout.dtypes, strict=True
        ):
            # `view(dtype)` needs a start that is a multiple of the element size: section_bytes are
            # multiples of 64.
            self.sections.append(memory[start : start + numel * dtype.itemsize].view(dtype))
            start += nbytes
        # One view of each entry, in its own shape and strides.
        self.views = [self._view(entry) for entry in layout.entries]
        self.is_there = True
        """Whether there is memory; without it there are neither sections nor views."""

    def let_go(self) -> None:
        """Do without memory until `get_back`; it is freed unless somebody else has views of it."""
        self.sections, self.views, self.is_there = [], [], False

    def get_back(self) -> None:
        """Allocate memory anew, of any content."""
        self._fill(torch.empty(self.layout.nbytes, dtype=torch.uint8, device=self.device))

    def write(self, values: Sequence[torch.Tensor | None], *, skip: Collection[int] = ()) -> None:
        """Copy one tensor into each entry, zeros for None; leave the entries in ``skip`` alone."""
        views, sources = [], []
        for number, (view, value) in enumerate(zip(self.views, values, strict=True)):
            if number in skip:
                continue
            # Zeroed, not skipped: the memory still holds the values of the step before.
            if value is None:
                view.zero_()
            else:
                views.append(view)
                sources.append(value)
        if views:
            copy_each(views, sources)

    def piece(self, piece: Piece) -> torch.Tensor:
        """A view of one piece: in the entry's shape if it is whole, else (numel,)."""
        if piece.whole:
            return self.views[piece.entry]
        entry = self.layout.entries[piece.entry]
        section = self.sections[entry.section]
        return section[entry.offset + piece.start : entry.offset + piece.stop]

    def chunk(self, chunk: Chunk) -> torch.Tensor:
        """(stop - start,) view of a stretch of one section."""
        return self.sections[chunk.section][chunk.start : chunk.stop]

    def _view(self, entry: Entry) -> torch.Tensor:
        section = self.sections[entry.section]
        stretch = section[entry.offset : entry.offset + entry.numel]
        # Going through DLPack gives the view a storage of its own size. An ordinary view would
        # share the section's storage, and saving or deep-copying one parameter would take the whole
        # section along. By a capsule: handed over itself, a tensor on a GPU that is not the current
        # one would be refused.
        return from_dlpack(to_dlpack(stretch)).as_strided(entry.shape, entry.stride)


def storage_order(tensor: torch.Tensor) -> torch.Tensor:
    """(numel,) view of a dense tensor's elements in the order in which they lie in memory."""
    # `reshape(-1)` would give their logical order, and copy a channels_last tensor to do so.
    return tensor.as_strided((tensor.numel(),), (1,))


def laid_out(tensor: torch.Tensor, stride: tuple[int, ...]) -> torch.Tensor:
    """The same values with the given dense strides: in the same memory if they lie there so."""
    if tensor.stride() == stride:
        return tensor
    # The stride of a dimension of length 1 says nothing about memory, and PyTorch sets it freely.
    sides = zip(tensor.shape, tensor.stride(), stride, strict=True)
    if all(ours == theirs for size, ours, theirs in sides if size > 1):
        return tensor.as_strided(tensor.shape, stride)
    laid = torch.empty_strided(tensor.shape, stride, dtype=tensor.dtype, device=tensor.device)
    return laid.copy_(tensor)


def extent(tensor: torch.Tensor) -> tuple[int, int]:
    """First and past-the-last address that a non-empty tensor may touch."""
    pairs = zip(tensor.shape, tensor.stride(), strict=True)
    last = sum((size - 1) * stride for size, stride in pairs)
    start = tensor.data_ptr()
    return start, start + (last + 1) * tensor.element_size()


def same_bits(one: torch.Tensor, other: torch.Tensor) -> bool:
    """Whether two tensors of one shape and dtype have the same bits; a NaN equals itself."""
    # Compared as bytes: `==` finds 0.0 equal to -0.0, and no NaN equal to any.
    first, second = one.contiguous().reshape(-1), other.contiguous().reshape(-1)
    return torch.equal(first.view(torch.uint8), second.view(torch.uint8))


def cut_pieces(layout: Layout, *, by_element: bool) -> tuple[Piece, ...]:
    """Cut every entry into pieces, in the order of sections and offsets.

    Args:
        layout: of the parameters.
        by_element: whether an entry may be divided; if not, every piece is whole.
    """
    # Nothing here may depend on the number of devices: see the note on pieces.
    total = sum(entry.numel for entry in layout.entries)
    step = _round_up(-(-total // _PIECES_OF_A_MODEL), _PIECE_MULTIPLE_NUMEL)
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


def _dense_stride(tensor: torch.Tensor) -> tuple[int, ...]:
    """The tensor's own strides if its elements fill one stretch of memory, else contiguous ones."""
    # From the fastest dimension to the slowest, each stride must be the size of what lies below it.
    # Dimensions of length 1 are exempt: PyTorch leaves arbitrary strides there.
    expected = 1
    dims = sorted(zip(tensor.stride(), tensor.shape, strict=True))
    for stride, size in dims:
        if size != 1 and stride != expected:
            return _contiguous_stride(tensor.shape)
        expected *= size
    return tuple(tensor.stride())


def _contiguous_stride(shape: Iterable[int]) -> tuple[int, ...]:
    # On the meta device nothing is allocated, and the rules for strides are PyTorch's own.
    return tuple(torch.empty(tuple(shape), device="meta").stride())


def aligned(nbytes: int) -> int:
    """Round up to a multiple of 64 bytes, where a tensor of any dtype may begin."""
    return _round_up(nbytes, _ALIGNMENT_BYTES)


def _round_up(number: int, multiple: int) -> int:
    return -(-number // multiple) * multiple
