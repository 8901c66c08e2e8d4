"""The devices that take part in a run: values that never change.

`Devices` says which devices there are, and which of them this process drives; `Assignment`, who
runs which shards and who updates what. The script may choose other shares between two steps, which
makes another assignment: nothing ever reads half of an old one and half of a new one.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch

from onefold.core.context import LaunchContext
from onefold.core.flat import Segment
from onefold.core.shard import Shares
from onefold.core.stages import Stages
from onefold.core.storage import cut_partitions

__all__ = ["Assignment", "Devices"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Assignment:
    """The devices of a run, who runs which shards, and who updates what."""

    devices: tuple[torch.device, ...]
    """All devices, in the order of their numbers."""
    shares: Shares
    """How many shards each device runs."""
    partitions: tuple[Sequence[int], ...]
    """For each device, the numbers of the segments that it updates, in ascending order; each
    segment in one of them."""

    @classmethod
    def first(
        cls,
        devices: Sequence[torch.device],
        *,
        shares: Shares,
        segments: Sequence[Segment],
        stages: Stages | None = None,
        early: Stages | None = None,
    ) -> Assignment:
        """Make the assignment that a run begins with, with partitions of even size.

        Args:
            devices: all devices, in the order of their numbers.
            shares: how many shards each of them runs.
            segments: the segments of the trained parameters.
            stages: of the model, if each device is to have a part of every stage, or the stages
                that it computes in a pipeline; the devices then take their shards in rounds.
            early: the same, where devices take their shards as they like.
        """
        return cls(
            devices=tuple(devices),
            shares=replace(shares, in_rounds=stages is not None),
            partitions=cut_partitions(segments, len(devices), stages or early),
        )

    def with_shares(self, shares: Shares) -> Assignment:
        """The same devices and partitions, with other shares."""
        return replace(self, shares=replace(shares, in_rounds=self.shares.in_rounds))


@dataclass(frozen=True, slots=True, kw_only=True)
class Devices:
    """All devices of the run, and which of them this process drives."""

    all: tuple[torch.device, ...]
    """All devices, in the order of their numbers."""
    own: tuple[int, ...]
    """Numbers of the devices that this process drives."""
    context: LaunchContext
    """How this process was started."""
    trainer: int
    """Number of the trainer among those of the script, counted from 0."""

    @property
    def has_lead(self) -> bool:
        """Whether this process drives device 0, which is the lead: it speaks for all of them."""
        return 0 in self.own

    @property
    def own_devices(self) -> dict[int, torch.device]:
        """This process's devices by number."""
        return {number: self.all[number] for number in self.own}
