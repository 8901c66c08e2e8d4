"""The sizes of everything that the devices of a run share."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch

from onefold.core.flat import Layout, Piece, aligned
from onefold.core.fold import max_blocks
from onefold.core.frozen import Frozen, side_by_side
from onefold.core.precision import added_up_in
from onefold.core.stages import StageLayout, Stages
from onefold.core.values import MOST

__all__ = ["BoardShape", "Storage"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Storage:
    """The layouts of parameters, gradients and buffers, and the numbers of devices and shards.

    The first three layouts have the same entries in the same order, and may differ in dtype. A
    piece is the same stretch of elements in each of them.
    """

    parameters: Layout
    """The trained parameters, in the dtypes in which models compute with them."""
    gradients: Layout
    """Their gradients, in the dtypes in which they are added up."""
    masters: Layout
    """Their values, in the dtypes in which the optimizer updates them."""
    other: Layout
    """The rest of the parameters: frozen ones, and those that no optimizer holds."""
    buffers: Layout
    """The module's buffers."""
    pieces: tuple[Piece, ...]
    """The pieces of the trained parameters."""
    shards: int
    """How many shards every batch is cut into."""
    devices: int
    """How many devices take part."""
    stages: Stages | None = None
    """The stages after each of which gradients are handed over; None if whole sums are."""
    frozen: Frozen | None = None
    """Frozen parameters of which each device keeps a part; they are not among the other ones."""

    @classmethod
    def alike(
        cls,
        trained: Layout,
        *,
        other: Layout,
        buffers: Layout,
        pieces: tuple[Piece, ...],
        shards: int,
        devices: int,
        stages: Stages | None = None,
        frozen: Frozen | None = None,
    ) -> Storage:
        """Update the very values that models compute with."""
        return cls(
            parameters=trained,
            gradients=trained.converted(added_up_in),
            masters=trained,
            other=other,
            buffers=buffers,
            pieces=pieces,
            shards=shards,
            devices=devices,
            stages=stages,
            frozen=frozen,
        )

    def with_masters(self, dtype: torch.dtype | None) -> Storage:
        """Have the optimizer update values of this dtype where models compute with another one."""
        if dtype is None:
            return self
        return replace(self, masters=self.parameters.converted(lambda _: dtype))

    @property
    def rounds(self) -> bool:
        """Whether models compute with other values, rounded ones, than the optimizer updates."""
        return self.masters.dtypes != self.parameters.dtypes

    def rounds_entry(self, number: int) -> bool:
        """Whether that is so for one trained parameter."""
        return self.masters.dtype_of(number) != self.parameters.dtype_of(number)

    def pieces_of(self, span: Sequence[int]) -> tuple[Piece, ...]:
        """The pieces of a span, which is given by their numbers."""
        return tuple(self.pieces[number] for number in span)

    @property
    def slots(self) -> int:
        """The most partial sums that a device may have to publish, whatever the plan is."""
        # Memory is shared before the first step, and a later plan must fit into it. One device adds
        # everything up itself, and publishes a single sum.
        return max_blocks(self.shards) if self.devices > 1 and self.stages is None else 1

    def stage_layout(self) -> StageLayout:
        """Where gradients lie in memory that holds one stage at a time.

        Raises:
            ValueError: whole sums are handed over.
        """
        if self.stages is None:
            raise ValueError("expected a model that is cut into stages")
        return StageLayout(self.gradients, self.pieces, self.stages)

    def lent_layout(self) -> StageLayout:
        """Where the parameters of a stage lie in memory that holds it while it is needed.

        The trained ones come first, and then the frozen ones of which devices keep parts.

        Raises:
            ValueError: whole sums are handed over.
        """
        if self.stages is None:
            raise ValueError("expected a model that is cut into stages")
        if self.frozen is None:
            return StageLayout(self.parameters, self.pieces, self.stages)
        layout = side_by_side(self.parameters, self.frozen.layout)
        return StageLayout(layout, self.lent_pieces(), self.frozen.after(self.stages))

    def lent_pieces(self) -> tuple[Piece, ...]:
        """The pieces of what `lent_layout` lays out."""
        if self.frozen is None:
            return self.pieces
        return self.pieces + self.frozen.counted_on(len(self.parameters.entries))

    def kept(self, spans: Sequence[Sequence[int]]) -> list[tuple[int, ...]]:
        """For each device, which pieces of `lent_pieces` it keeps.

        Args:
            spans: for each device, the pieces of the trained parameters that it updates.
        """
        if self.frozen is None:
            return [tuple(span) for span in spans]
        first = len(self.pieces)
        pairs = zip(spans, self.frozen.spans, strict=True)
        return [(*span, *(first + number for number in frozen)) for span, frozen in pairs]

    @property
    def board(self) -> BoardShape:
        """The sizes of the board."""
        return BoardShape(
            devices=self.devices,
            shards=self.shards,
            parameters=len(self.parameters.entries),
            buffers=self.buffers,
        )


@dataclass(frozen=True, slots=True)
class BoardShape:
    """The numbers that determine the size of a board."""

    devices: int
    shards: int
    parameters: int
    buffers: Layout

    @property
    def host_bytes(self) -> tuple[int, ...]:
        """Bytes of the tables of weights, gave, changed, kinds and left_out, each aligned."""
        # (V,) float64 weights, (devices, parameters) int32 of gave, (V, buffers) uint8 of changed,
        # (V,) int64 of kinds and of left_out.
        changed, numbers = self.shards * len(self.buffers.entries), self.shards * 8
        sizes = (numbers, self.devices * self.parameters * 4, changed, numbers, numbers)
        return tuple(map(aligned, sizes))

    @property
    def device_bytes(self) -> int:
        """Bytes of the totals, of the values, and of one row of buffers for each shard."""
        # (V,) float64 totals. They come first, so that the rows begin at an aligned place.
        return aligned(self.shards * 8) + self.values_bytes + self.shards * self.buffers.nbytes

    @property
    def values_bytes(self) -> int:
        """Bytes of the room for what losses return beside themselves."""
        # (V, MOST, 2) float64: totals and weights.
        return aligned(self.shards * MOST * 2 * 8)
