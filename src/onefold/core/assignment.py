"""The devices that take part in a run, and what each of them does.

`Devices` says which devices there are, and which of them this process drives; `Assignment`, who
runs which shards and who updates what. An assignment never changes. The script may choose other
shares between two steps, which makes another assignment: nothing ever reads half of an old one and
half of a new one.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch

from onefold.core.flat import Segment
from onefold.core.options import LaunchContext
from onefold.core.shard import Shares
from onefold.core.stages import Stages
from onefold.core.storage import cut_partitions

__all__ = ["Assignment", "Devices", "Roster"]


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
class Roster:
    """The devices of a group, in the order of their numbers."""

    devices: tuple[torch.device, ...]
    seats: tuple[int, ...]
    """The seat of each."""
    context: LaunchContext
    """How this process reaches the others of the group."""


class Devices:
    """Who takes part in a run, and which of them this process drives: the one owner of membership.

    A *seat* is a device for its whole life in a run: the launcher's rank, its log, its worker, its
    row of `onefold.exchange.progress.Progress`. A *number* is its place in the current group: in
    messages, partitions and shares; number 0 leads. In the first group the two are the same.

    Note: who may change it, and when
    ---------------------------------
    `regroup` alone, once for all devices alike, between two steps: no call of the trainer is under
    way, no gradient is kept, and the exchange of the group before is closed. Right behind it the
    engine is assembled anew. Nobody else keeps a part of this, or of what an engine says of its
    group: whoever needs it asks, each time. Only what is made for one group, or for one call, may
    keep numbers: the exchange, replicas and their memory, an `Assignment`, a checkpoint that is
    being written.

    Args:
        all: all devices, in the order of their numbers.
        own: numbers of the devices that this process drives.
        context: how this process was started.
        trainer: number of the trainer among those of the script, counted from 0.
    """

    def __init__(
        self,
        *,
        all: Sequence[torch.device],
        own: Sequence[int],
        context: LaunchContext,
        trainer: int,
    ) -> None:
        self.trainer = trainer
        """Number of the trainer among those of the script, counted from 0."""
        self.seats = tuple(own)
        """The seats that this process drives, as long as it lives."""
        self.regroup(Roster(devices=tuple(all), seats=tuple(range(len(all))), context=context))

    def regroup(self, roster: Roster) -> None:
        """Have another group take part from here on; see the note.

        Args:
            roster: the group, in which this process has a device.
        """
        self.roster = roster
        """The current group."""
        numbers = {seat: number for number, seat in enumerate(roster.seats)}
        self.own = tuple(sorted(numbers[seat] for seat in self.seats if seat in numbers))
        """Numbers of the devices that this process drives."""

    @property
    def all(self) -> tuple[torch.device, ...]:
        """All devices, in the order of their numbers."""
        return self.roster.devices

    @property
    def context(self) -> LaunchContext:
        """How this process was started, and reaches the others."""
        return self.roster.context

    @property
    def has_lead(self) -> bool:
        """Whether this process drives device 0, which is the lead: it speaks for all of them."""
        return 0 in self.own

    @property
    def own_devices(self) -> dict[int, torch.device]:
        """This process's devices by number."""
        return {number: self.all[number] for number in self.own}
