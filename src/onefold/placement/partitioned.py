"""Each device keeps a partition of the parameters, and hands gradients over stage by stage.

Where devices share no memory, the parameters of a stage are gathered while they are needed (see
`onefold.placement.parameters`). Where they do, all parameters are in that memory, and gradients
alone are partitioned. With `Offloaded` the model is stored on the host, in a file.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import replace
from typing import TYPE_CHECKING

import torch

from onefold.core.assignment import Devices
from onefold.core.fold import blocks_of
from onefold.core.results import Gradients, ShardResult
from onefold.core.settings import Settings
from onefold.core.storage import Storage
from onefold.exchange.exchange import has_memory_in_common
from onefold.exchange.reduction import GradientSend, StageReduction
from onefold.placement.base import Before, Done, Estimates, Placement, PlacementLayout, StepContext
from onefold.placement.parameters import PartitionedParameters
from onefold.placement.replicated import Replicated
from onefold.shard.model_parts import ModelParts
from onefold.shard.stage_modules import StageModules
from onefold.shard.task import ShardTask
from onefold.system.accelerator import capacity_bytes
from onefold.system.allocator import DEFAULT_ALLOCATOR, TensorAllocator
from onefold.system.file_memory import MmapAllocator

if TYPE_CHECKING:
    from onefold.placement.footprint import Footprint

__all__ = ["Offloaded", "Partitioned"]


class Partitioned(Placement):
    """Parameters, gradients and optimizer state are partitioned over all devices."""

    pipeline = 1
    """How many devices compute a shard together."""

    @classmethod
    def simplest(cls, devices: Devices, settings: Settings) -> type[Placement]:
        # One shard is added to nothing, so there is nothing to hand over stage by stage.
        return Replicated if cls is Partitioned and settings.shards == 1 else cls

    @classmethod
    def estimate(cls, sizes: Footprint, devices: int, *, together: bool) -> Estimates:
        if devices == 1:
            return {"partition": Replicated.estimate(sizes, 1, together=together)["replicate"]}
        if together:
            sums = sizes.gradients * (1 + sizes.levels(devices))
            own = (sums + sizes.state) // devices + sizes.EXCHANGED * sizes.stage
            return {"partition": own + sizes.values(devices, together=True)}
        # What is added up between the rounds, and stages on their way.
        ends = range(devices, sizes.shards, devices)
        summed = max((len(blocks_of(range(end), sizes.shards)) for end in ends), default=1)
        below = sizes.gradients * summed // devices + sizes.in_transit(devices, begun=bool(ends))
        updated = (sizes.gradients + sizes.scratch) // devices
        kept = (sizes.parameters + sizes.frozen + sizes.state) // devices + sizes.other
        return {"partition": kept + max(below, updated)}

    def layout(
        self, parts: ModelParts, stages: Sequence[torch.nn.Module] | None
    ) -> PlacementLayout:
        found = StageModules(parts.module, stages, parts.trained, self.pipeline)
        allocator = self.allocator()
        if self.shards_frozen(allocator):
            parts.partition_frozen(found)
        self.chosen = PlacementLayout(found, allocator)
        return self.chosen

    def allocator(self) -> TensorAllocator:
        """What the model lies in on the host."""
        return DEFAULT_ALLOCATOR

    def shards_frozen(self, allocator: TensorAllocator) -> bool:
        """Whether frozen parameters that lie in a stage are partitioned as well."""
        return not has_memory_in_common(self.devices)

    def check(self, storage: Storage) -> None:
        held = storage.partitioned_layout().stage_bytes
        self._check(storage, held, "parameters and gradient")

    def _check(self, storage: Storage, held: Sequence[int], what: str) -> None:
        """Refuse a stage that is larger than a device.

        Args:
            storage: the sizes of the run.
            held: for each stage, the bytes of its parameters that a device has at once.
            what: names what is counted.
        """
        assert storage.stages is not None
        needed = list(map(sum, zip(storage.stage_layout().stage_bytes, held, strict=True)))
        largest = max(range(len(needed)), key=needed.__getitem__)
        device = self.devices.all[self.devices.own[0]]
        capacity = capacity_bytes(device)
        if needed[largest] > capacity:
            raise ValueError(
                f"stage {storage.stages.names[largest]} is larger than a device: expected at most "
                f"{capacity:,} bytes, which {device} has, got {needed[largest]:,} bytes of {what}. "
                f"Cut it with Trainer(stages=[...]), or cut its largest layer into modules of "
                f"their own: docs/do/large-models.md. `onefold plan` shows all stages"
            )

    def start(self, context: StepContext) -> None:
        super().start(context)
        if context.exchange.memory.is_partitioned:
            self.parameters = PartitionedParameters(context)

    @property
    def _reduction(self) -> StageReduction:
        reduction = self.context.exchange.reduction
        assert isinstance(reduction, StageReduction)
        return reduction

    def run_shards(self, task: ShardTask, done: Done, before: Before) -> Gradients | None:
        context, table, reduction = self.context, self.context.table, self._reduction
        batch = task.batch
        # One shard of each device of this process in every round.
        with self.parameters.rounds(task) as task:
            reduction.start_step(shard for shard, size in enumerate(batch.sizes) if not size)
            # Compiled code gives all gradients at once, when it is done, and all stages with them.
            task = replace(task, send=None if context.compilers.compiled else reduction.give)
            with ExitStack() as surrounding:
                for replica in context.replicas:
                    table.clear_rows(replica.number, batch.shares.shards_of(replica.number))
                    replica.start_step(task)
                    with context.attached(replica):
                        surrounding.enter_context(before(replica))
                for row in batch.shares.rounds():
                    for replica in context.replicas:
                        shard = row.get(replica.number, -1)
                        if shard not in batch.shards:
                            continue
                        found = done.get(shard)
                        if found is None:
                            with context.attached(replica):
                                found = replica.compute(shard, task)
                        if found.gradients:
                            _give_all(reduction, shard, found)
                        table.record(replica.number, shard, found)
                    reduction.end_round()
        for replica in context.replicas:
            replica.end()
        return None


def _give_all(reduction: StageReduction, shard: int, result: ShardResult) -> None:
    """Hand over the gradients of a shard that has kept them."""
    for stage, numbers in reversed(list(enumerate(reduction.stages.entries))):
        gradients = [result.gradients[number] for number in numbers]
        reduction.give(GradientSend(shard, stage, True, gradients))


class Offloaded(Partitioned):
    """Parameters, gradients and optimizer state lie in a file of which memory holds what it can.

    A processor computes with what is in the file. A GPU has the parameters of a stage gathered from
    there, as from another device, and the optimizer's state comes to it segment by segment.
    """

    @classmethod
    def estimate(cls, sizes: Footprint, devices: int, *, together: bool) -> Estimates:
        if together:
            held = sizes.EXCHANGED * sizes.stage
        else:
            # What it sends of a stage it must have there, as well.
            sent = sizes.stage // devices if devices > 1 else 0
            held = sizes.other + sizes.in_transit(devices, begun=True) + sent
        sums = sizes.gradients * (1 + sizes.levels())
        file = sizes.parameters + sizes.frozen + sizes.other + sizes.state + sums
        return {"offload": held, "offload:file": file}

    def allocator(self) -> TensorAllocator:
        devices = self.devices
        kind = devices.all[devices.own[0]].type
        if kind != "cpu" and len(devices.own) > 1:
            raise ValueError(
                f"expected one {kind} device in each process for placement=offload, got "
                f"{len(devices.own)} of Trainer(devices=...): leave them out, and start the script "
                f"by onefold run --devices"
            )
        return MmapAllocator.at(devices.context.options.offload_dir, apart=kind != "cpu")

    def shards_frozen(self, allocator: TensorAllocator) -> bool:
        return allocator.apart

    def check(self, storage: Storage) -> None:
        if self.chosen.allocator.apart:
            super().check(storage)
        else:
            # Parameters stay in the file, so that the gradient alone must fit.
            self._check(storage, [0] * len(storage.stage_layout().stage_bytes), "gradient")

    def leave(self, *, together: bool) -> None:
        # What is kept apart from a device has no room there as a whole.
        if not self.chosen.allocator.apart:
            super().leave(together=together)
