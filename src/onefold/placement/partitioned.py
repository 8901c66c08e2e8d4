"""Each device keeps a partition of the parameters, and gradients are reduced stage by stage.

If devices share no memory, the parameters of a stage are gathered while they are needed (see
`onefold.placement.parameters`). If they do, all parameters are in the shared memory, and only
gradients are partitioned. With `Offloaded` the model is stored on the host, in a file.
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
    """Number of devices that compute a shard together."""

    @classmethod
    def simplest(cls, devices: Devices, settings: Settings) -> type[Placement]:
        # A single shard is not summed with others, so reducing stage by stage is unnecessary.
        return Replicated if cls is Partitioned and settings.shards == 1 else cls

    @classmethod
    def estimate(cls, sizes: Footprint, devices: int, *, together: bool) -> Estimates:
        if devices == 1:
            return {"partition": Replicated.estimate(sizes, 1, together=together)["replicate"]}
        if together:
            sums = sizes.gradients * (1 + sizes.levels(devices))
            own = (sums + sizes.state) // devices + sizes.EXCHANGED * sizes.stage
            return {"partition": own + sizes.values(devices, together=True)}
        # Partial sums between the rounds, and stages in transit.
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
        """Return the allocator of the model's host memory."""
        return DEFAULT_ALLOCATOR

    def shards_frozen(self, allocator: TensorAllocator) -> bool:
        """Return whether frozen parameters in stages are partitioned as well."""
        return not has_memory_in_common(self.devices)

    def check(self, storage: Storage) -> None:
        held = storage.partitioned_layout().stage_bytes
        self._check(storage, held, "parameters and gradient")

    def _check(self, storage: Storage, held: Sequence[int], what: str) -> None:
        """Check that every stage fits on a device.

        Args:
            storage: sizes of the run.
            held: bytes of each stage's parameters that a device holds at once.
            what: name of the counted values.
        """
        assert storage.stages is not None
        needed = list(map(sum, zip(storage.stage_layout().stage_bytes, held, strict=True)))
        largest = max(range(len(needed)), key=needed.__getitem__)
        device = self.devices.all[self.devices.own[0]]
        capacity = capacity_bytes(device)
        if needed[largest] > capacity:
            raise ValueError(
                f"stage {storage.stages.names[largest]} needs {needed[largest]:,} bytes of {what}, "
                f"but {device} has only {capacity:,}. Split it with Trainer(stages=[...]), or "
                f"split its largest layer into several modules: "
                f"https://onefold.example/do/large-models.html. `onefold plan` lists all stages"
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
        # Each round runs one shard on every device of this process.
        with self.parameters.rounds(task) as task:
            reduction.start_step(shard for shard, size in enumerate(batch.sizes) if not size)
            # Compiled code computes all gradients at once, at its end, and cannot send stages
            # early.
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
    """Send the gradients of a shard that has kept them."""
    for stage, numbers in reversed(list(enumerate(reduction.stages.entries))):
        gradients = [result.gradients[number] for number in numbers]
        reduction.give(GradientSend(shard, stage, True, gradients))


class Offloaded(Partitioned):
    """Parameters, gradients and optimizer state are in a file, cached in memory as space allows.

    A CPU computes directly with the values in the file. A GPU gathers the parameters of a stage
    from the file, as from another device, and receives the optimizer state segment by segment.
    """

    @classmethod
    def estimate(cls, sizes: Footprint, devices: int, *, together: bool) -> Estimates:
        if together:
            held = sizes.EXCHANGED * sizes.stage
        else:
            # The device also holds the part of a stage that it sends.
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
                f"placement=offload requires one {kind} device per process, but got "
                f"{len(devices.own)} in Trainer(devices=...). Omit devices, and start the script "
                f"with onefold run --devices"
            )
        return MmapAllocator.at(devices.context.options.offload_dir, apart=kind != "cpu")

    def shards_frozen(self, allocator: TensorAllocator) -> bool:
        return allocator.apart

    def check(self, storage: Storage) -> None:
        if self.chosen.allocator.apart:
            super().check(storage)
        else:
            # Parameters stay in the file, so only the gradient must fit.
            self._check(storage, [0] * len(storage.stage_layout().stage_bytes), "gradient")

    def leave(self, *, together: bool) -> None:
        # If the model is stored apart from the device, the device cannot hold all of it.
        if not self.chosen.allocator.apart:
            super().leave(together=together)
