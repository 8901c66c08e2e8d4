"""The devices that take part in a run, from one step to another: a value that never changes.

Note: the next roster
---------------------
A plan that follows measured speed, a device that dies, one that joins, one more host: each of these
is a new roster with the next generation number. Whatever depends on who takes part (the exchange,
the optimizer on its spans, loaders, checkpoints) is bound to a roster, and between two steps it is
bound to the next one. Nothing ever reads half of an old roster and half of a new one.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch

from onefold.core.flat import Piece, cut_spans
from onefold.core.shard import Plan

__all__ = ["Roster"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Roster:
    """The devices of a run, who runs which shards, and who updates what."""

    generation: int = 0
    """Number of this roster in the run, counted from 0."""
    devices: tuple[torch.device, ...]
    """All devices, in the order of their numbers."""
    hosts: tuple[int, ...]
    """For each device, the number of its host."""
    plan: Plan
    """How many shards each device runs."""
    spans: tuple[range, ...]
    """For each device, the numbers of the pieces that it updates: contiguous, in the same order."""

    def __post_init__(self) -> None:
        sizes = {len(self.devices), len(self.hosts), self.plan.devices, len(self.spans)}
        if len(sizes) != 1:
            raise ValueError(
                f"expected a host, a share of the plan and a span for each of "
                f"{len(self.devices)} devices, got {len(self.hosts)} hosts, "
                f"{self.plan.devices} shares and {len(self.spans)} spans"
            )
        # Spans must tile the pieces: a gap would leave parameters as they are in every step, an
        # overlap would have two devices write the same memory.
        stop = 0
        for device, span in enumerate(self.spans):
            if (span.start, span.step) != (stop, 1) or span.stop < span.start:
                raise ValueError(
                    f"expected the span of device {device} to begin with piece {stop}, where that "
                    f"of the device before it ends, got {span}"
                )
            stop = span.stop

    @classmethod
    def first(
        cls,
        devices: Sequence[torch.device],
        *,
        plan: Plan,
        pieces: Sequence[Piece],
        hosts: Sequence[int] | None = None,
    ) -> Roster:
        """Make the roster that a run begins with, with spans of even size.

        Args:
            devices: all devices, in the order of their numbers.
            plan: how many shards each of them runs.
            pieces: the pieces of the trained parameters.
            hosts: for each device, the number of its host; if absent, all are on one host.
        """
        return cls(
            devices=tuple(devices),
            hosts=tuple(hosts or [0] * len(devices)),
            plan=plan,
            spans=cut_spans(pieces, len(devices)),
        )

    def next(self, *, plan: Plan | None = None, spans: Sequence[range] | None = None) -> Roster:
        """Make the roster that follows this one, with the same devices.

        Raises:
            ValueError: the plan or the spans are for a different number of devices, or the spans
                hold a different number of pieces.
        """
        spans = self.spans if spans is None else tuple(spans)
        if not spans or spans[-1].stop != self.pieces:
            raise ValueError(f"expected spans of {self.pieces} pieces in all, got {spans}")
        return replace(
            self,
            generation=self.generation + 1,
            plan=self.plan if plan is None else plan,
            spans=spans,
        )

    @property
    def pieces(self) -> int:
        """Number of pieces in all spans."""
        return self.spans[-1].stop

    def owner_of(self, piece: int) -> int:
        """The device that updates a piece."""
        return next(device for device, span in enumerate(self.spans) if piece in span)
