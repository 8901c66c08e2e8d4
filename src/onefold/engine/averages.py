"""The averages of the model: of parameters piece by piece at their owners, of buffers everywhere.

Note: where an average lies
---------------------------
The owner of a piece keeps its average, as it keeps the piece's state of the optimizer, so all
devices together hold one. An average travels, and is saved, among that state under a key of its
own. Every process keeps the averages of all buffers, which are few and alike everywhere.

Pieces do not depend on the number of devices, and an average is computed element by element from
values that every run has alike. So the bits of the averages do not depend on it either.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from functools import partial

import torch
from torch.optim.swa_utils import get_ema_multi_avg_fn

from onefold.core.averaging import AverageRule, averaged_in
from onefold.core.flat import FlatTensors, storage_order
from onefold.engine.optimizerstate import PieceState
from onefold.engine.visits import change_at
from onefold.system.heap import ORDINARY, Heap

__all__ = ["AVERAGE", "Averages"]

AVERAGE = "onefold.average"
"""The key under which the average of a piece, or of a buffer, travels and is saved."""


class Averages:
    """The averages that this process keeps; none until `begin`.

    Args:
        heap: where those of pieces lie.
    """

    def __init__(self, heap: Heap = ORDINARY) -> None:
        self._heap = heap
        self.rule: AverageRule | None = None
        """How they follow the model; None where there are none."""
        self.steps = 0
        """How many steps they have followed; those that were skipped do not count."""
        self.pieces: dict[int, torch.Tensor] = {}
        """The average of each piece of this process, by the piece's number: of the shape and the
        strides of the values that the optimizer updates."""
        self.buffers: FlatTensors | None = None
        """The averages of the module's buffers, on this process's first device."""

    def begin(
        self,
        rule: AverageRule,
        values: Mapping[int, torch.Tensor],
        buffers: FlatTensors,
        *,
        steps: int = 0,
    ) -> None:
        """Begin with the values as they are now, where `adopt` has brought no average.

        Args:
            rule: how the averages are to follow.
            values: of the pieces of this process, by number.
            buffers: the module's buffers.
            steps: how many steps the averages that were brought have followed.
        """
        self.rule, self.steps = rule, steps
        for number, value in values.items():
            if number not in self.pieces:
                self.adopt(number, value, storage_order(value))
        if self.buffers is None:
            self.buffers = FlatTensors(buffers.layout.converted(averaged_in), device=buffers.device)
            for kept, section in zip(self.buffers.sections, buffers.sections, strict=True):
                kept.copy_(section)

    def end(self) -> None:
        """Keep no averages any more."""
        self.rule, self.steps, self.buffers = None, 0, None
        self.pieces.clear()

    def follow(self, values: Mapping[int, torch.Tensor], buffers: FlatTensors) -> None:
        """Update the averages after a step that updated the model, when that is due.

        Args:
            values: of the pieces of this process, by number.
            buffers: the module's buffers.
        """
        if self.rule is None or self.buffers is None:
            return
        self.steps += 1
        if self.steps % self.rule.every:
            return
        kept = self.rule.kept(self.steps // self.rule.every)
        if self._heap.apart:
            for number, value in values.items():
                newest = [value.to(buffers.device)]
                move = partial(_move, values=newest, kept=kept)
                change_at(buffers.device, [self.pieces[number]], move)
        else:
            _move([self.pieces[number] for number in values], list(values.values()), kept)
        for average, section in zip(self.buffers.sections, buffers.sections, strict=True):
            _move_buffers(average, section, kept)

    def states(self) -> list[PieceState]:
        """List the averages of the pieces as states that travel."""
        return [
            PieceState(number, AVERAGE, storage_order(average), True)
            for number, average in self.pieces.items()
        ]

    def adopt(self, number: int, values: torch.Tensor, average: torch.Tensor) -> None:
        """Keep the average of a piece that has come from elsewhere.

        Args:
            number: the piece's.
            values: of the piece; their shape, strides and device are the average's.
            average: (numel,) in storage order; copied.
        """
        self.pieces[number] = self._heap.like(values, averaged_in(values.dtype))
        storage_order(self.pieces[number]).copy_(average)

    def adopt_buffers(self, layout_of: FlatTensors, states: Iterable[PieceState]) -> None:
        """Keep averages of buffers that have come from elsewhere.

        Args:
            layout_of: the module's buffers.
            states: one for each buffer, by its number in the layout; copied.
        """
        layout = layout_of.layout.converted(averaged_in)
        self.buffers = FlatTensors(layout, device=layout_of.device)
        for state in states:
            self.buffers.views[state.piece].copy_(state.value)

    def keep(self, numbers: Collection[int]) -> None:
        """Drop the averages of all other pieces."""
        self.pieces = {n: average for n, average in self.pieces.items() if n in numbers}


def _move(averages: Sequence[torch.Tensor], values: Sequence[torch.Tensor], kept: float) -> None:
    """Move averages towards values in place; the nearer, the less of them is kept."""
    alike: dict[
        tuple[torch.device, torch.dtype], tuple[list[torch.Tensor], list[torch.Tensor]]
    ] = {}
    # A list on several devices or of several dtypes falls back to a kernel for each tensor.
    for average, value in zip(averages, values, strict=True):
        group = alike.setdefault((average.device, average.dtype), ([], []))
        group[0].append(average)
        group[1].append(value.detach().to(average.dtype))
    move = get_ema_multi_avg_fn(kept)  # type: ignore[no-untyped-call]
    for targets, sources in alike.values():
        move(targets, sources, 0)


def _move_buffers(average: torch.Tensor, section: torch.Tensor, kept: float) -> None:
    """Move the averages of a section of buffers; whole numbers take the newest value."""
    newest = section.to(average.dtype)
    if not (average.is_floating_point() or average.is_complex()):
        average.copy_(newest)
        return
    moved = average.clone()
    _move([moved], [newest], kept)
    # Masks hold infinities, which have no average: infinity less infinity is not a number.
    average.copy_(torch.where(torch.isfinite(moved), moved, newest))
