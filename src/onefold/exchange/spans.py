"""Partial sums, span by span: where they lie, how they are moved, how the owner adds them.

Note: which memory a partial sum lies in
----------------------------------------
Backward makes one gradient tensor per parameter. Small ones are copied side by side into flat
memory, where a whole run of them is moved and added as one. Large ones stay where backward put
them, as copying them would cost as much as adding them: only what another process must see in
shared memory is copied.

Note: whose memory the sum ends up in
-------------------------------------
The owner of a span adds in place to the leftmost partial sum, whoever published it. This is safe
between ``collect`` and ``spread``: everybody has finished writing, each owner touches its own span
alone, and nobody else reads this stretch. The total is then a view of that partial sum, so neither
may be written again before ``spread`` has returned on every device.
"""

from __future__ import annotations

import mmap
from collections.abc import Callable, Sequence
from typing import Protocol

import torch

from onefold.core.flat import Chunk, FlatTensors, Layout, Piece, laid_out, storage_order
from onefold.core.fold import Block, Published, fold, published_by
from onefold.core.shard import Plan
from onefold.core.storage import cut_chunks
from onefold.system.compat import copy_each

__all__ = ["AsGiven", "Partial", "SpanFold", "SpanTensors", "Spanned"]


class Spanned(Protocol):
    """Memory that holds at least one span of the trained parameters' layout."""

    def chunk(self, chunk: Chunk) -> torch.Tensor:
        """A view of one chunk, (stop - start,) in the dtype of its section."""

    def piece(self, piece: Piece) -> torch.Tensor | None:
        """A view of one piece: in the entry's shape if it is whole, else (numel,).

        None where no shard gave a gradient.
        """


class SpanTensors:
    """Memory for one span of a layout only: what an owner receives from the other devices.

    Args:
        layout: the layout that the pieces belong to.
        span: a contiguous run of pieces.
        device: where to allocate.
    """

    def __init__(self, layout: Layout, span: Sequence[Piece], device: torch.device) -> None:
        bounds: dict[int, tuple[int, int]] = {}  # section: first element, and the one after last
        for piece in span:
            entry = layout.entries[piece.entry]
            first, _ = bounds.get(entry.section, (entry.offset + piece.start, 0))
            bounds[entry.section] = (first, entry.offset + piece.stop)
        self._starts = {section: start for section, (start, _) in bounds.items()}
        self._sections = {
            section: torch.zeros(stop - start, dtype=layout.dtypes[section], device=device)
            for section, (start, stop) in bounds.items()
        }
        self._pieces = {piece: self._view(layout, piece) for piece in span}

    def chunk(self, chunk: Chunk) -> torch.Tensor:
        """A view of one chunk, (stop - start,)."""
        first = self._starts[chunk.section]
        return self._sections[chunk.section][chunk.start - first : chunk.stop - first]

    def piece(self, piece: Piece) -> torch.Tensor:
        """A view of one piece: in the entry's shape if it is whole, else (numel,)."""
        return self._pieces[piece]

    def _view(self, layout: Layout, piece: Piece) -> torch.Tensor:
        entry = layout.entries[piece.entry]
        start = entry.offset + piece.start
        # A whole piece gets the parameter's own strides; a part of one is a run of its storage.
        flat = self.chunk(Chunk(entry.section, start, start + piece.numel, None))
        return flat.as_strided(entry.shape, entry.stride) if piece.whole else flat


class Partial:
    """One block's gradients: the large ones where backward left them, the others in flat memory.

    Args:
        flat: room for all of them, the large ones included.
    """

    def __init__(self, flat: FlatTensors) -> None:
        self.flat = flat
        self._visible: list[Chunk] = []
        self._large = [n for n in range(len(flat.views)) if flat.layout.is_large(n)]
        self._direct: dict[int, torch.Tensor] = {}

    @classmethod
    def private(cls, layout: Layout, device: torch.device) -> Partial:
        """Make one that is read through this object alone.

        Its flat memory is not cleared: pages of a processor's memory that were never touched take
        no room, so the stretches of large gradients cost nothing.
        """
        if device.type == "cpu":
            return cls(FlatTensors(layout, memory=_untouched(layout.nbytes)))
        return cls(
            FlatTensors(layout, memory=torch.empty(layout.nbytes, dtype=torch.uint8, device=device))
        )

    def show(self, visible: Sequence[Chunk]) -> None:
        """Copy these chunks into ``flat`` at every `write`, as other processes read them there."""
        # A chunk of no single entry is made of small ones, which lie in flat memory anyway.
        self._visible = [chunk for chunk in visible if chunk.entry is not None]

    def write(self, gradients: Sequence[torch.Tensor | None]) -> None:
        """Take over one gradient for each entry; None stands for zeros."""
        # Only a gradient laid out as its entry is can be cut into pieces by offset, as flat memory
        # is. Autograd may return other strides, for instance those of a transposed tensor.
        self._direct = {
            number: gradient
            for number in self._large
            if (gradient := gradients[number]) is not None
            and gradient.stride() == self.flat.layout.entries[number].stride
            and gradient.dtype == self.flat.views[number].dtype
        }
        # Skipped stretches keep old values: nobody reads them there unless they are shown below.
        self.flat.write(gradients, skip=self._direct.keys())
        # In shared memory the others see the file alone, so what they will read is copied there.
        shown = [chunk for chunk in self._visible if chunk.entry in self._direct]
        if shown:
            targets = [self.flat.chunk(chunk) for chunk in shown]
            copy_each(targets, [self.chunk(chunk) for chunk in shown])

    def chunk(self, chunk: Chunk) -> torch.Tensor:
        """A view of one chunk, (stop - start,), wherever it lies."""
        gradient = None if chunk.entry is None else self._direct.get(chunk.entry)
        if gradient is None or chunk.entry is None:
            return self.flat.chunk(chunk)
        offset = self.flat.layout.entries[chunk.entry].offset
        return storage_order(gradient)[chunk.start - offset : chunk.stop - offset]

    def piece(self, piece: Piece) -> torch.Tensor:
        """A view of one piece: in the entry's shape if it is whole, else (numel,)."""
        gradient = self._direct.get(piece.entry)
        if gradient is None:
            return self.flat.piece(piece)
        return gradient if piece.whole else storage_order(gradient)[piece.start : piece.stop]

    def release(self) -> None:
        """Drop the gradients taken over by `write`, so that their memory can be used again."""
        self._direct = {}


class AsGiven:
    """Gradients where backward left them, read only by the device that computed them.

    Args:
        layout: the layout of the gradients.
    """

    def __init__(self, layout: Layout) -> None:
        self._entries = layout.entries
        self.gradients: Sequence[torch.Tensor | None] = ()
        """One for each entry, shaped like it; None where no shard gave one."""

    def chunk(self, chunk: Chunk) -> torch.Tensor:
        """Refuse: a single partial sum is added to nothing, so nobody asks for its chunks."""
        raise TypeError("expected a single partial sum, which is added to nothing")

    def piece(self, piece: Piece) -> torch.Tensor | None:
        """A view of one piece: in the entry's shape if it is whole, else (numel,)."""
        gradient = self.gradients[piece.entry]
        if gradient is None or piece.whole:
            return gradient
        return storage_order(laid_out(gradient, self._entries[piece.entry].stride))[
            piece.start : piece.stop
        ]


class SpanFold:
    """The owner's part of the fold: adds the published partial sums over one span.

    It goes chunk by chunk: the sums of the tree's inner nodes are then still in the processor's
    cache when they are added in turn, and a chunk can be added while later ones are on their way.

    Args:
        layout: the layout of the gradients.
        span: the pieces that this device owns.
        shards: how many shards every batch is cut into.
    """

    def __init__(self, layout: Layout, span: Sequence[Piece], shards: int) -> None:
        self.chunks = cut_chunks(layout, span)
        self._span = span
        self._shards = shards
        self.totals: list[torch.Tensor | None] = []
        """One tensor for each piece of the span, shaped like it; None where no shard gave one."""

    def fold(
        self,
        plan: Plan,
        memory: Callable[[Published], Spanned],
        *,
        home: FlatTensors | None = None,
        arrived: Callable[[int], None] | None = None,
    ) -> None:
        """Add up the partial sums; ``totals`` are ready afterwards.

        Args:
            plan: who published what.
            memory: returns the memory of a partial sum.
            home: where the total goes, if it cannot stay where the leftmost partial sum lies.
            arrived: waits until the chunk of this number has been received.
        """
        # From the plan alone, so every owner adds the same blocks in the same order.
        published = published_by(plan)
        memories = {block: memory(at) for block, at in published.items()}
        # A lone partial sum that is here, and may stay where it lies, is the total already.
        nothing_to_do = len(published) == 1 and arrived is None and home is None
        for number, chunk in enumerate(() if nothing_to_do else self.chunks):
            if arrived is not None:
                arrived(number)
            parts = {block: partial.chunk(chunk) for block, partial in memories.items()}
            if home is not None:
                parts = {block: part.to(home.device) for block, part in parts.items()}
            # In place, left before right: the leftmost part ends up as the total, and its own value
            # is gone. Each chunk is therefore folded exactly once a step.
            total = fold(parts.get, Block(0, self._shards), _add_in_place)
            # `to` copies nothing on the same device, so the total may be in its place already.
            if home is not None and total.data_ptr() != home.chunk(chunk).data_ptr():
                home.chunk(chunk).copy_(total)
        source: Spanned = memories[min(memories)] if home is None else home
        self.totals = [source.piece(piece) for piece in self._span]

    def release(self) -> None:
        """Drop the totals, which are views of somebody's partial sum."""
        self.totals = []


def _untouched(nbytes: int) -> torch.Tensor:
    """Memory of a processor that takes no room until it is written to: (nbytes,) uint8."""
    # Not PyTorch's own, which may lie where gradients lay before: a process keeps that memory.
    return torch.frombuffer(_pages(max(nbytes, 1)), dtype=torch.uint8)[:nbytes]


def _pages(nbytes: int) -> mmap.mmap:
    # Private: shared ones would be no huge pages, and forked readers of data would share them.
    return mmap.mmap(-1, nbytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)


def _add_in_place(left: torch.Tensor, right: torch.Tensor) -> torch.Tensor:
    return left.add_(right)
