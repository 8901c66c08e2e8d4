"""Frozen parameters of which each device keeps a part, as it does of the trained ones. Pure.

Nothing is computed from the bounds of these parts, so that they may depend on the devices. Their
pieces are counted on from those of the trained parameters, and follow them in the memory of a
stage.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from onefold.core.cutting import cut_pieces, cut_spans_by_stage, cut_spans_in_lines
from onefold.core.flat import Layout, Piece
from onefold.core.stages import Stages

__all__ = ["Frozen", "side_by_side"]


@dataclass(frozen=True, slots=True)
class Frozen:
    """The frozen parameters that lie in stages, and what each device keeps of them."""

    layout: Layout
    """Of all of them together."""
    stage_of: tuple[int, ...]
    """The stage of each; none is of the root."""
    pieces: tuple[Piece, ...]
    """What they are cut into."""
    spans: tuple[tuple[int, ...], ...]
    """For each device, the pieces that it keeps, in ascending order: of each stage neighbours."""

    @classmethod
    def cut(
        cls, layout: Layout, stage_of: tuple[int, ...], places: Sequence[int], devices: int
    ) -> Frozen:
        """Share frozen parameters out.

        Args:
            layout: of all of them together.
            stage_of: the stage of each.
            places: for each stage, the place of a device that computes it in its line; none where
                every device computes all stages.
            devices: how many there are.
        """
        pieces = cut_pieces(layout, by_element=True)
        if places:
            lines = devices // (max(places) + 1)
            spans = cut_spans_in_lines(pieces, stage_of, places, lines)
        else:
            spans = cut_spans_by_stage(pieces, stage_of, devices)
        return cls(layout, stage_of, pieces, spans)

    def after(self, stages: Stages) -> Stages:
        """The stages of the trained parameters, and then of these."""
        return replace(stages, stage_of=(*stages.stage_of, *self.stage_of))

    def counted_on(self, entries: int) -> tuple[Piece, ...]:
        """The pieces, where so many other parameters come first."""
        return tuple(replace(piece, entry=piece.entry + entries) for piece in self.pieces)


def side_by_side(one: Layout, other: Layout) -> Layout:
    """The entries of one layout and then those of another one, in sections of their own."""
    first = len(one.dtypes)
    moved = tuple(replace(entry, section=entry.section + first) for entry in other.entries)
    return Layout(one.entries + moved, one.dtypes + other.dtypes, one.numels + other.numels)
