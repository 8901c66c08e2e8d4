"""Keeps averages of the model (EMA or SWA): of parameters on their owners, of buffers everywhere.

Note: where an average is stored
--------------------------------
The owner of a segment stores its average, like its optimizer state, so all devices together store
one average. Averages are sent and saved together with that state, under a separate key. Every
process stores the averages of all buffers, which are few and the same everywhere.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch.optim.swa_utils import get_ema_multi_avg_fn

from onefold.core.flat import FlatTensors, storage_order
from onefold.core.numbers import check_whole
from onefold.core.settings import added_up_in
from onefold.system.allocator import TensorAllocator
from onefold.update.staging import SegmentState, Staging

__all__ = ["AVERAGE", "AverageRule", "Averages"]


AVERAGE = "onefold.average"
"""Key under which the average of a segment, or of a buffer, is sent and saved."""


@dataclass(frozen=True, slots=True)
class AverageRule:
    """Rule that lets an average follow the values of the model."""

    decay: float | None
    """Fraction of an EMA that stays in each update; None for the plain mean (SWA)."""
    every: int = 1
    """Number of steps between updates of the average."""
    after: str = ""
    """The loss whose steps the average follows; empty for all steps."""

    def __post_init__(self) -> None:
        check_whole("every", self.every, least=1)
        if self.decay is None:
            return
        if isinstance(self.decay, bool) or not isinstance(self.decay, int | float):
            raise TypeError(f"decay must be a number, but got {self.decay!r}")
        if not 0 <= self.decay < 1:
            raise ValueError(f"decay must be at least 0 and less than 1, but got {self.decay}")

    @classmethod
    def chosen(cls, *, decay: float | None, mean: bool, every: int, after: str = "") -> AverageRule:
        """Make the rule from the user's arguments.

        Raises:
            TypeError, ValueError: both kinds are chosen or none, or a number is out of range.
        """
        if not isinstance(mean, bool):
            raise TypeError(f"mean must be True or False, but got {mean!r}")
        if mean == (decay is not None):
            raise ValueError(
                f"pass either decay, such as decay=0.999 for an exponential average, or mean=True "
                f"for the plain mean, but got decay={decay} and mean={mean}"
            )
        return cls(decay, every, after)

    @property
    def words(self) -> str:
        """Arguments that choose the rule.

        >>> AverageRule(0.99).words
        'decay=0.99, every=1'
        """
        kind = "mean=True" if self.decay is None else f"decay={float(self.decay)}"
        after = f", after={self.after!r}" if self.after else ""
        return f"{kind}, every={self.every}{after}"

    def kept(self, update: int) -> float:
        """Return the fraction of the average that stays in an update, between 0 and 1.

        An EMA warms up: the first values soon have little weight, whatever the decay.

        Args:
            update: number of the update, counted from 1.

        >>> [round(AverageRule(0.9).kept(n), 3) for n in (1, 10, 100)]
        [0.182, 0.55, 0.9]
        >>> AverageRule(None).kept(4)
        0.75
        """
        if self.decay is None:
            # The mean of ``update`` values: the newest one has weight 1 / update.
            return 1.0 - 1.0 / update
        return min(self.decay, (1.0 + update) / (10.0 + update))

    def to_json(self, steps: int) -> dict[str, Any]:
        """Return the rule as JSON for a checkpoint, with the number of steps followed."""
        # Store a float, even if the user passed decay=0.
        decay = None if self.decay is None else float(self.decay)
        return {"decay": decay, "every": self.every, "after": self.after, "steps": steps}

    @classmethod
    def from_json(cls, saved: Mapping[str, Any]) -> AverageRule:
        """Read what `to_json` wrote, after it was checked."""
        return cls(saved["decay"], saved["every"], saved.get("after", ""))


class Averages:
    """The averages that this process stores; none until `start`.

    Args:
        allocator: allocates the averages of segments.
        staging: moves segments to the device that computes.
    """

    def __init__(self, allocator: TensorAllocator, staging: Staging) -> None:
        self._allocator, self._staging = allocator, staging
        self.rule: AverageRule | None = None
        """The rule of the averages; None if there are none."""
        self.steps = 0
        """Number of steps followed, without skipped ones."""
        self.segments: dict[int, torch.Tensor] = {}
        """Average of each segment of this process, by the segment's number. It has the shape and
        strides of the values that the optimizer updates."""
        self.buffers: FlatTensors | None = None
        """Averages of the module's buffers, on this process's first device."""

    def start(
        self,
        rule: AverageRule,
        values: Mapping[int, torch.Tensor],
        buffers: FlatTensors,
        *,
        steps: int = 0,
    ) -> None:
        """Start from the current values, except where `adopt` has already stored an average.

        Args:
            rule: the rule of the averages.
            values: values of this process's segments, by number.
            buffers: the module's buffers.
            steps: number of steps that the adopted averages followed.
        """
        self.rule, self.steps = rule, steps
        for number, value in values.items():
            # A resumed run has adopted some averages already.
            if number not in self.segments:
                self.adopt(number, value, storage_order(value))
        if self.buffers is None:
            self.buffers = FlatTensors(buffers.layout.converted(added_up_in), device=buffers.device)
            self.buffers.copy_(buffers)

    def end(self) -> None:
        """Drop all averages."""
        self.rule, self.steps, self.buffers = None, 0, None
        self.segments.clear()

    def follow(self, values: Mapping[int, torch.Tensor], buffers: FlatTensors) -> None:
        """Update the averages after a step that updated the model, if it is due.

        Args:
            values: values of this process's segments, by number.
            buffers: the module's buffers.
        """
        if self.rule is None or self.buffers is None:
            return
        self.steps += 1
        if self.steps % self.rule.every:
            return
        # Elementwise, from values that are the same on any number of devices, and so are the
        # averages.
        kept = self.rule.kept(self.steps // self.rule.every)
        self._staging.change(
            lambda averages, newest: _move(averages, newest, kept),
            [self.segments[number] for number in values],
            list(values.values()),
        )
        for average, section in zip(self.buffers.sections, buffers.sections, strict=True):
            _move_buffers(average, section, kept)

    def states(self) -> list[SegmentState]:
        """List the averages of the segments as states, to be sent or saved."""
        return [
            SegmentState(number, AVERAGE, storage_order(average), True)
            for number, average in self.segments.items()
        ]

    def adopt(self, number: int, values: torch.Tensor, average: torch.Tensor) -> None:
        """Store the average of a segment that another device or a file holds.

        Args:
            number: the number of the segment.
            values: the segment's values; the average gets their shape, strides and device.
            average: (numel,) in storage order; copied.
        """
        self.segments[number] = self._allocator.like(values, added_up_in(values.dtype))
        storage_order(self.segments[number]).copy_(average)

    def adopt_buffers(self, layout_of: FlatTensors, states: Iterable[SegmentState]) -> None:
        """Store averages of buffers that another device or a file holds.

        Args:
            layout_of: the module's buffers.
            states: one for each buffer, by its number in the layout; copied.
        """
        layout = layout_of.layout.converted(added_up_in)
        self.buffers = FlatTensors(layout, device=layout_of.device)
        for state in states:
            self.buffers.views[state.segment].copy_(state.value)


def _move(averages: Sequence[torch.Tensor], values: Sequence[torch.Tensor], kept: float) -> None:
    """Move averages toward values in place; ``kept`` is the fraction that stays."""
    alike: dict[
        tuple[torch.device, torch.dtype], tuple[list[torch.Tensor], list[torch.Tensor]]
    ] = {}
    # PyTorch falls back to one kernel per tensor if a list has several devices or dtypes.
    for average, value in zip(averages, values, strict=True):
        group = alike.setdefault((average.device, average.dtype), ([], []))
        group[0].append(average)
        group[1].append(value.detach().to(average.dtype))
    move = get_ema_multi_avg_fn(kept)  # type: ignore[no-untyped-call]
    for targets, sources in alike.values():
        move(targets, sources, 0)


def _move_buffers(average: torch.Tensor, section: torch.Tensor, kept: float) -> None:
    """Move the averages of a section of buffers; integers take the newest value."""
    # The average may have a wider dtype than the buffer, see `added_up_in`.
    newest = section.to(average.dtype)
    if not (average.is_floating_point() or average.is_complex()):
        average.copy_(newest)
        return
    moved = average.clone()
    _move([moved], [newest], kept)
    # Masks contain infinities, which have no average: infinity minus infinity is NaN.
    average.copy_(torch.where(torch.isfinite(moved), moved, newest))
