"""Where a model may be cut: which of its parameters lie in which stage. Pure."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from onefold.core.flat import Layout, Piece, aligned

__all__ = ["ROOT", "StageLayout", "Stages"]

ROOT = 0
"""The stage of what lies in no other one, or in several."""


@dataclass(frozen=True, slots=True)
class Stages:
    """The stage of each trained parameter; stage 0 is the root."""

    names: tuple[str, ...]
    """What each stage is called in messages, the root included."""
    stage_of: tuple[int, ...]
    """For each trained parameter, in the order of their layout, the number of its stage."""
    places: tuple[int, ...] = ()
    """For each stage, the place of the device that computes it, in a line of several devices;
    empty where every device computes all stages."""

    @property
    def line(self) -> int:
        """How many devices compute the model together."""
        return max(self.places, default=0) + 1

    @property
    def entries(self) -> tuple[tuple[int, ...], ...]:
        """For each stage, the numbers of its parameters."""
        return tuple(
            tuple(number for number, stage in enumerate(self.stage_of) if stage == wanted)
            for wanted in range(len(self.names))
        )

    def __len__(self) -> int:
        return len(self.names)


class StageLayout:
    """Where pieces lie in memory that holds one stage at a time.

    Args:
        layout: of what is held there.
        pieces: of the whole model.
        stages: the stage of each entry.
    """

    def __init__(self, layout: Layout, pieces: Sequence[Piece], stages: Stages) -> None:
        self.layout = layout
        self.stages = stages
        self.pieces: list[list[int]] = [[] for _ in stages.names]
        """For each stage, the numbers of its pieces."""
        self._places: list[tuple[int, int, torch.dtype]] = []
        self._starts: dict[int, int] = {}
        filled = [0] * len(stages)
        for number, piece in enumerate(pieces):
            stage = stages.stage_of[piece.entry]
            dtype = layout.dtype_of(piece.entry)
            nbytes = piece.numel * dtype.itemsize
            self.pieces[stage].append(number)
            self._starts.setdefault(piece.entry, filled[stage])
            self._places.append((filled[stage], nbytes, dtype))
            filled[stage] += aligned(nbytes)
        self.stage_bytes = tuple(filled)
        """Bytes of each stage."""

    @property
    def nbytes(self) -> int:
        """Bytes of the largest stage."""
        return max(self.stage_bytes)

    def place(self, number: int) -> tuple[int, int, torch.dtype]:
        """Where a piece begins and how long it is, in bytes, and its dtype."""
        return self._places[number]

    def whole(self, entry: int, room: torch.Tensor, *, begins: int = 0) -> torch.Tensor:
        """View of an entry, in its shape, in memory that holds its stage from some byte on."""
        found, dtype = self.layout.entries[entry], self.layout.dtype_of(entry)
        # The pieces of an entry follow each other without gaps.
        start = self._starts[entry] - begins
        stretch = room[start : start + found.numel * dtype.itemsize].view(dtype)
        return stretch.as_strided(found.shape, found.stride)

    def in_room(self, number: int, room: torch.Tensor) -> torch.Tensor:
        """(numel,) view of a piece in memory that holds its stage, (stage_bytes,) uint8."""
        start, nbytes, dtype = self._places[number]
        return room[start : start + nbytes].view(dtype)
