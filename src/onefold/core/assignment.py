"""The devices that take part in a run, from one step to another: a value that never changes.

`Devices` says which devices there are, and which of them this process drives.

Note: the next assignment
---------------------
A plan that follows measured speed, a device that dies, one that joins, one more host: each of these
is a new assignment with the next generation number. Whatever depends on who takes part (the
exchange, the optimizer on its partitions, loaders, checkpoints) is bound to an assignment, and
between two steps it is bound to the next one. Nothing ever reads half of an old assignment and half
of a new one.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import chain, pairwise

import torch

from onefold.core.context import LaunchContext
from onefold.core.flat import Piece
from onefold.core.shard import Plan
from onefold.core.stages import Stages
from onefold.core.storage import (
    cut_partitions,
    cut_partitions_by_stage,
    cut_partitions_in_pipelines,
)

__all__ = ["Assignment", "Devices"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Assignment:
    """The devices of a run, who runs which shards, and who updates what."""

    generation: int = 0
    """Number of this assignment in the run, counted from 0."""
    devices: tuple[torch.device, ...]
    """All devices, in the order of their numbers."""
    hosts: tuple[int, ...]
    """For each device, the number of its host."""
    plan: Plan
    """How many shards each device runs."""
    partitions: tuple[Sequence[int], ...]
    """For each device, the numbers of the pieces that it updates, in ascending order."""

    def __post_init__(self) -> None:
        sizes = {len(self.devices), len(self.hosts), self.plan.devices, len(self.partitions)}
        if len(sizes) != 1:
            raise ValueError(
                f"expected a host, a share of the plan and a partition for each of "
                f"{len(self.devices)} devices, got {len(self.hosts)} hosts, "
                f"{self.plan.devices} shares and {len(self.partitions)} partitions"
            )
        # Partitions must tile the pieces: a gap would leave parameters as they are in every step,
        # an overlap would have two devices write the same memory.
        owners = Counter(chain.from_iterable(self.partitions))
        pieces = max(owners, default=-1) + 1
        wrong = next((piece for piece in range(pieces) if owners[piece] != 1), None)
        if wrong is not None:
            raise ValueError(
                f"expected every piece in one partition, got piece {wrong} in {owners[wrong]}: "
                f"{self.partitions}"
            )
        for device, partition in enumerate(self.partitions):
            if any(later <= earlier for earlier, later in pairwise(partition)):
                raise ValueError(
                    f"expected the pieces of device {device} in ascending order, got {partition}"
                )

    @classmethod
    def first(
        cls,
        devices: Sequence[torch.device],
        *,
        plan: Plan,
        pieces: Sequence[Piece],
        hosts: Sequence[int] | None = None,
        stages: Stages | None = None,
    ) -> Assignment:
        """Make the assignment that a run begins with, with partitions of even size.

        Args:
            devices: all devices, in the order of their numbers.
            plan: how many shards each of them runs.
            pieces: the pieces of the trained parameters.
            hosts: for each device, the number of its host; if absent, all are on one host.
            stages: of the model, if each device is to have a part of every stage, or the stages
                that it computes in a pipeline; the devices then take their shards in rounds.
        """
        return cls(
            devices=tuple(devices),
            hosts=tuple(hosts or [0] * len(devices)),
            plan=replace(plan, in_rounds=stages is not None),
            partitions=_first_partitions(pieces, stages, len(devices)),
        )

    def next(
        self, *, plan: Plan | None = None, partitions: Sequence[Sequence[int]] | None = None
    ) -> Assignment:
        """Make the assignment that follows this one, with the same devices.

        Raises:
            ValueError: the plan or the partitions are for a different number of devices, or the
                partitions hold a different number of pieces.
        """
        partitions = self.partitions if partitions is None else tuple(partitions)
        if max(chain.from_iterable(partitions), default=-1) + 1 != self.pieces:
            raise ValueError(
                f"expected partitions of {self.pieces} pieces in all, got {partitions}"
            )
        return replace(
            self,
            generation=self.generation + 1,
            plan=replace(plan or self.plan, in_rounds=self.plan.in_rounds),
            partitions=partitions,
        )

    @property
    def pieces(self) -> int:
        """Number of pieces in all partitions."""
        return sum(map(len, self.partitions))

    def owner_of(self, piece: int) -> int:
        """The device that updates a piece."""
        return next(
            device for device, partition in enumerate(self.partitions) if piece in partition
        )


def _first_partitions(
    pieces: Sequence[Piece], stages: Stages | None, devices: int
) -> tuple[Sequence[int], ...]:
    if stages is None:
        return cut_partitions(pieces, devices)
    if not stages.places:
        return cut_partitions_by_stage(pieces, stages.stage_of, devices)
    pipelines = devices // stages.pipeline
    return cut_partitions_in_pipelines(pieces, stages.stage_of, stages.places, pipelines)


@dataclass(frozen=True, slots=True, kw_only=True)
class Devices:
    """All devices of the run, and which of them this process drives."""

    devices: tuple[torch.device, ...]
    """All devices, in the order of their numbers."""
    own: tuple[int, ...]
    """Numbers of the devices that this process drives."""
    context: LaunchContext
    """How this process was started."""
    trainer: int
    """Number of the trainer among those of the script, counted from 0."""

    @property
    def hosts(self) -> tuple[int, ...]:
        """For each device, the number of its host; the ranks of one host are consecutive."""
        # Only torchrun spans several hosts; every other launch has all devices on this one.
        here = self.context.local_size if self.context.launcher == "torch" else len(self.devices)
        return tuple(number // max(1, here) for number in range(len(self.devices)))

    @property
    def has_lead(self) -> bool:
        """Whether this process drives device 0, which is the lead: it speaks for all of them."""
        return 0 in self.own

    @property
    def own_devices(self) -> dict[int, torch.device]:
        """This process's devices by number."""
        return {number: self.devices[number] for number in self.own}
