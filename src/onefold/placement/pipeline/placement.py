"""Each device keeps some stages of the model, and shards pass from device to device."""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING

import torch

from onefold.core.assignment import Devices
from onefold.core.results import Gradients
from onefold.core.settings import Settings
from onefold.core.stages import ROOT, Stages, cut_pipeline, waiting
from onefold.placement.base import Before, Done, Estimates, Placement, StepContext
from onefold.placement.partitioned import Partitioned
from onefold.placement.pipeline.boundary import StageBoundary
from onefold.placement.pipeline.worker import PipelineWorker
from onefold.shard.stage_modules import StageModules
from onefold.shard.task import ShardTask

if TYPE_CHECKING:
    from onefold.placement.footprint import Footprint

__all__ = ["Pipelined"]

_log = logging.getLogger("onefold")


class Pipelined(Partitioned):
    """The stages of the model are divided among the devices of one or several pipelines."""

    def __init__(self, devices: Devices, settings: Settings) -> None:
        super().__init__(devices, settings)
        options = devices.context.options
        options.check_combination(microbatch=settings.microbatch)
        self.pipeline = options.pipeline_of(len(devices.all))

    @classmethod
    def simplest(cls, devices: Devices, settings: Settings) -> type[Placement]:
        # A pipeline of one device computes all stages itself.
        alone = devices.context.options.pipeline_of(len(devices.all)) == 1
        return Partitioned.simplest(devices, settings) if alone else cls

    @classmethod
    def estimate(cls, sizes: Footprint, devices: int, *, together: bool) -> Estimates:
        root, *rest = sizes.stage_gradients
        if devices > len(rest):
            return {"pipeline": None}
        shares = [root] + [0] * (devices - 1)
        for place, share in zip(cut_pipeline(sizes.stage_values[1:], devices), rest, strict=True):
            shares[place] += share
        share = max(shares)
        state = sizes.state * share // max(sizes.gradients, 1)
        sums = share * (1 + sizes.levels())
        return {"pipeline": sums + state + sizes.values(devices, together=together)}

    def start(self, context: StepContext) -> None:
        super().start(context)
        modules = context.first.stages
        assert modules is not None
        _check_code(modules, compiled=context.compilers.compiled)
        self._boundaries = [
            StageBoundary(modules, replica.number % self.pipeline, self.parameters)
            for replica in context.replicas
        ]
        if context.leads:
            _tell(modules.stages, context.devices // self.pipeline, self.settings.shards)

    def run_shards(self, task: ShardTask, done: Done, before: Before) -> Gradients | None:
        context, batch, reduction = self.context, task.batch, self._reduction
        exchange = context.exchange
        exchange.transport.forget_messages()  # of an earlier step that failed
        reduction.start_step(shard for shard, size in enumerate(batch.sizes) if not size)
        workers = []
        for replica, boundary in zip(context.replicas, self._boundaries, strict=True):
            exchange.table.clear_rows(replica.number, batch.shares.shards_of(replica.number))
            replica.start_step(task)
            workers.append(PipelineWorker(replica, boundary, context, task))
        try:
            with self.parameters.in_pipeline(run_checks=task.run_checks):
                while busy := [worker for worker in workers if not worker.is_done]:
                    for worker in busy:
                        while not worker.is_done and worker.can_go():
                            worker.go()
                exchange.transport.finish_sending()
                reduction.end_round()
        except BaseException:
            # Ctrl-C may have interrupted the code that undoes the changes to the model.
            for boundary in self._boundaries:
                boundary.undo()
            raise
        for replica in context.replicas:
            replica.end()
        return None


def _check_code(modules: StageModules, *, compiled: bool) -> None:
    """Check that no code is compiled that a pipeline has to interrupt.

    Raises:
        ValueError: ``torch.compile`` is used in the model or its loss, or ``torch.jit`` in a stage.
    """
    if compiled:
        raise ValueError(
            "--placement pipeline does not support compiled models, because it interrupts the "
            "loss. Omit torch.compile and compile=True, or use --placement partition"
        )
    for name, module in zip(modules.stages.names[ROOT + 1 :], modules.modules, strict=True):
        if isinstance(module, torch.jit.ScriptModule):
            raise ValueError(
                f"--placement pipeline requires stages that Python calls, but torch.jit has "
                f"compiled {name}. Omit torch.jit, or use --placement partition"
            )


def _tell(stages: Stages, pipelines: int, shards: int) -> None:
    """Log the stages of each device, and the idle time of pipelines."""
    parts = []
    for place in range(stages.pipeline):
        own = [n for n, at in zip(stages.names, stages.places, strict=True) if at == place]
        named = own[ROOT + 1 :] if place == 0 else own
        parts.append(named[0] if len(named) == 1 else f"{named[0]} to {named[-1]}")
    most = -(-shards // pipelines)
    _log.warning(
        "%s of %d devices: %s. With %d shard%s%s, a step takes %.0f %% longer than the work of "
        "one device, because devices wait for each other. With more shards they wait less",
        "a pipeline" if pipelines == 1 else f"{pipelines} pipelines side by side, each",
        stages.pipeline,
        " | ".join(parts),
        most,
        "" if most == 1 else "s",
        "" if pipelines == 1 else " in a pipeline",
        100 * waiting(stages.pipeline, most),
    )
