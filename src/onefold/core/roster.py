"""Who takes part in a run, from one step to another: a value that never changes.

Note: the next roster
---------------------
A plan that follows measured speed, a device that dies, one that joins, one host more: each of them
is another roster with the next generation number. What depends on who takes part (the exchange, the
optimizer on its spans, loaders, checkpoints) is bound to a roster, and is bound to the next one
between two steps. Nothing reads half of an old roster and half of a new one.
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
    """Counts the rosters of a run, from 0."""
    devices: tuple[torch.device, ...]
    """By number."""
    hosts: tuple[int, ...]
    """Number of each device's host."""
    plan: Plan
    """How many shards each device runs."""
    spans: tuple[range, ...]
    """Numbers of the pieces that each device updates: contiguous, in the devices' order."""

    def __post_init__(self) -> None:
        sizes = {len(self.devices), len(self.hosts), self.plan.devices, len(self.spans)}
        if len(sizes) != 1:
            raise ValueError(
                f"expected a host, a share of the plan and a span for each of "
                f"{len(self.devices)} devices, got {len(self.hosts)} hosts, "
                f"{self.plan.devices} shares and {len(self.spans)} spans"
            )
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
        """The roster that a run begins with: spans of even size.

        Args:
            devices: by number.
            plan: how many shards each of them runs.
            pieces: of the trained parameters.
            hosts: number of each device's host; all on one if absent.
        """
        return cls(
            devices=tuple(devices),
            hosts=tuple(hosts or [0] * len(devices)),
            plan=plan,
            spans=cut_spans(pieces, len(devices)),
        )

    def next(self, *, plan: Plan | None = None, spans: Sequence[range] | None = None) -> Roster:
        """The roster that follows this one, with the same devices.

        Raises:
            ValueError: the plan or the spans are for another number of devices, or the spans hold
                another number of pieces.
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
