"""Keeps the averages of the model: of parameters by segment at their owners, of buffers everywhere.

Note: where an average lies
---------------------------
The owner of a segment keeps its average, as it keeps the segment's state of the optimizer, so all
devices together hold one. An average travels, and is saved, among that state under a key of its
own. Every process keeps the averages of all buffers, which are few and alike everywhere.

Segments do not depend on the number of devices, and an average is computed element by element from
values that every run has alike. So the bits of the averages do not depend on it either.
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
"""The key under which the average of a segment, or of a buffer, travels and is saved."""


@dataclass(frozen=True, slots=True)
class AverageRule:
    """How an average follows the values of the model."""

    decay: float | None
    """How much of an exponential average stays in each update; None for the plain mean."""
    every: int = 1
    """After how many steps the average is updated each time."""
    after: str = ""
    """The loss whose steps it follows; empty for all steps."""

    def __post_init__(self) -> None:
        check_whole("every", self.every, least=1)
        if self.decay is None:
            return
        if isinstance(self.decay, bool) or not isinstance(self.decay, int | float):
            raise TypeError(f"expected decay to be a number, got {self.decay!r}")
        if not 0 <= self.decay < 1:
            raise ValueError(f"expected decay to be at least 0 and less than 1, got {self.decay}")

    @classmethod
    def chosen(cls, *, decay: float | None, mean: bool, every: int, after: str = "") -> AverageRule:
        """The rule of which a user named the kind.

        Raises:
            TypeError, ValueError: both kinds are named or none, or a number is out of range.
        """
        if not isinstance(mean, bool):
            raise TypeError(f"expected mean to be True or False, got {mean!r}")
        if mean == (decay is not None):
            raise ValueError(
                f"expected either decay, such as decay=0.999 for an exponential average, or "
                f"mean=True for the plain mean, got decay={decay} and mean={mean}"
            )
        return cls(decay, every, after)

    @property
    def words(self) -> str:
        """The arguments that choose it.

        >>> AverageRule(0.99).words
        'decay=0.99, every=1'
        """
        kind = "mean=True" if self.decay is None else f"decay={float(self.decay)}"
        after = f", after={self.after!r}" if self.after else ""
        return f"{kind}, every={self.every}{after}"

    def kept(self, update: int) -> float:
        """How much of the average stays in an update, between 0 and 1.

        A warm-up: the values at the beginning soon have little weight, whatever the decay.

        Args:
            update: number of the update, counted from 1.

        >>> [round(AverageRule(0.9).kept(n), 3) for n in (1, 10, 100)]
        [0.182, 0.55, 0.9]
        >>> AverageRule(None).kept(4)
        0.75
        """
        if self.decay is None:
            return 1.0 - 1.0 / update
        return min(self.decay, (1.0 + update) / (10.0 + update))

    def to_json(self, steps: int) -> dict[str, Any]:
        """Describe it in a checkpoint, with the number of steps that it has followed."""
        # As a float also where the user wrote decay=0.
        decay = None if self.decay is None else float(self.decay)
        return {"decay": decay, "every": self.every, "after": self.after, "steps": steps}

    @classmethod
    def from_json(cls, saved: Mapping[str, Any]) -> AverageRule:
        """Read what `to_json` has written, once that has been checked."""
        return cls(saved["decay"], saved["every"], saved.get("after", ""))


class Averages:
    """The averages that this process keeps; none until `start`.

    Args:
        allocator: where those of segments lie.
        staging: brings segments to the device that computes.
    """

    def __init__(self, allocator: TensorAllocator, staging: Staging) -> None:
        self._allocator, self._staging = allocator, staging
        self.rule: AverageRule | None = None
        """How they follow the model; None where there are none."""
        self.steps = 0
        """How many steps they have followed; those that were skipped do not count."""
        self.segments: dict[int, torch.Tensor] = {}
        """The average of each segment of this process, by the segment's number: of the shape and
        the strides of the values that the optimizer updates."""
        self.buffers: FlatTensors | None = None
        """The averages of the module's buffers, on this process's first device."""

    def start(
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
            values: of the segments of this process, by number.
            buffers: the module's buffers.
            steps: how many steps the averages that were brought have followed.
        """
        self.rule, self.steps = rule, steps
        for number, value in values.items():
            if number not in self.segments:
                self.adopt(number, value, storage_order(value))
        if self.buffers is None:
            self.buffers = FlatTensors(buffers.layout.converted(added_up_in), device=buffers.device)
            self.buffers.copy_(buffers)

    def end(self) -> None:
        """Keep no averages any more."""
        self.rule, self.steps, self.buffers = None, 0, None
        self.segments.clear()

    def follow(self, values: Mapping[int, torch.Tensor], buffers: FlatTensors) -> None:
        """Update the averages after a step that updated the model, when that is due.

        Args:
            values: of the segments of this process, by number.
            buffers: the module's buffers.
        """
        if self.rule is None or self.buffers is None:
            return
        self.steps += 1
        if self.steps % self.rule.every:
            return
        kept = self.rule.kept(self.steps // self.rule.every)
        self._staging.change(
            lambda averages, newest: _move(averages, newest, kept),
            [self.segments[number] for number in values],
            list(values.values()),
        )
        for average, section in zip(self.buffers.sections, buffers.sections, strict=True):
            _move_buffers(average, section, kept)

    def states(self) -> list[SegmentState]:
        """List the averages of the segments as states that travel."""
        return [
            SegmentState(number, AVERAGE, storage_order(average), True)
            for number, average in self.segments.items()
        ]

    def adopt(self, number: int, values: torch.Tensor, average: torch.Tensor) -> None:
        """Keep the average of a segment that has come from elsewhere.

        Args:
            number: the number of the segment.
            values: of the segment; their shape, strides and device are the average's.
            average: (numel,) in storage order; copied.
        """
        self.segments[number] = self._allocator.like(values, added_up_in(values.dtype))
        storage_order(self.segments[number]).copy_(average)

    def adopt_buffers(self, layout_of: FlatTensors, states: Iterable[SegmentState]) -> None:
        """Keep averages of buffers that have come from elsewhere.

        Args:
            layout_of: the module's buffers.
            states: one for each buffer, by its number in the layout; copied.
        """
        layout = layout_of.layout.converted(added_up_in)
        self.buffers = FlatTensors(layout, device=layout_of.device)
        for state in states:
            self.buffers.views[state.segment].copy_(state.value)


def _move(averages: Sequence[torch.Tensor], values: Sequence[torch.Tensor], kept: float) -> None:
    """Move averages toward values in place; the nearer, the less of them is kept."""
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
