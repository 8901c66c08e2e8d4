"""The devices of a run, and the work of each device.

`Devices` knows all devices, and which of them this process drives. `Assignment` sets which device
runs which shards and updates which segments. An assignment is immutable: if the script changes the
shares between two steps, a new assignment replaces it, so that no reader sees a mixture of both.
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
    """The devices of a run, the shards that each runs, and the segments that each updates."""

    devices: tuple[torch.device, ...]
    """All devices, by number."""
    shares: Shares
    """Number of shards that each device runs."""
    partitions: tuple[Sequence[int], ...]
    """Numbers of the segments that each device updates, in ascending order; every segment belongs
    to exactly one device."""

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
        """Make the initial assignment of a run, with partitions of even size.

        Args:
            devices: all devices, by number.
            shares: number of shards that each device runs.
            segments: segments of the trained parameters.
            stages: stages of the model, if each device has a part of every stage, or the stages
                that it computes in a pipeline. The devices then run their shards in rounds.
            early: stages of the model, if each device has a part of every stage, but devices run
                their shards independently.
        """
        return cls(
            devices=tuple(devices),
            shares=replace(shares, in_rounds=stages is not None),
            partitions=cut_partitions(segments, len(devices), stages or early),
        )

    def with_shares(self, shares: Shares) -> Assignment:
        """Return the same devices and partitions, with other shares."""
        return replace(self, shares=replace(shares, in_rounds=self.shares.in_rounds))


@dataclass(frozen=True, slots=True, kw_only=True)
class Roster:
    """The devices of a group, by number."""

    devices: tuple[torch.device, ...]
    seats: tuple[int, ...]
    """Seat of each device."""
    context: LaunchContext
    """How this process reaches the others of the group."""


class Devices:
    """The devices of a run, and which of them this process drives: the one owner of membership.

    A *seat* identifies a device for its whole life in a run: the launcher's rank, its log, its
    worker, its row of `onefold.exchange.progress.Progress`. A *number* is its place in the current
    group: in messages, partitions and shares. Number 0 is the lead. In the first group the two are
    equal.

    Note: when membership changes
    -----------------------------
    Only `regroup` changes it, on all devices, between two steps: no trainer call is in progress, no
    gradient is kept, and the exchange of the previous group is closed. Immediately afterwards the
    engine is rebuilt. Other code must not store any of this, or the engine's values for its group,
    but read them each time. Only objects made for one group or one call may keep numbers: the
    exchange, replicas and their memory, an `Assignment`, a checkpoint that is being written.

    Args:
        all: all devices, by number.
        own: numbers of the devices that this process drives.
        context: how this process was started.
        trainer: number of the trainer among those of the script, from 0.
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
        """Number of the trainer among those of the script, from 0."""
        self.seats = tuple(own)
        """Seats that this process drives, as long as it lives."""
        self.regroup(Roster(devices=tuple(all), seats=tuple(range(len(all))), context=context))

    def regroup(self, roster: Roster) -> None:
        """Replace the group; see the note above for when.

        Args:
            roster: the new group, which includes a device of this process.
        """
        self.roster = roster
        """The current group."""
        numbers = {seat: number for number, seat in enumerate(roster.seats)}
        self.own = tuple(sorted(numbers[seat] for seat in self.seats if seat in numbers))
        """Numbers of the devices that this process drives."""

    @property
    def all(self) -> tuple[torch.device, ...]:
        """All devices, by number."""
        return self.roster.devices

    @property
    def context(self) -> LaunchContext:
        """How this process was started, and how it reaches the others."""
        return self.roster.context

    @property
    def has_lead(self) -> bool:
        """Whether this process drives device 0, the lead, which acts for all devices."""
        return 0 in self.own

    @property
    def own_devices(self) -> dict[int, torch.device]:
        """The devices of this process, by number."""
        return {number: self.all[number] for number in self.own}
