"""Placement of parameters, gradients and optimizer state, and how a step computes with them.

`Placement` is the interface that a run uses; ``--placement`` selects an implementation.
`ResidentParameters` gives access to parameters if each device has all of them. `StepContext` is
this process's part of a run: the objects that each step, and each pass over data, computes with.

Note: differences between placements
------------------------------------
Agreement, losses, verdict, clipping, update, checkpoints and passes over data are the same in all
placements. A placement decides how the model is cut before memory is allocated
(`Placement.layout`), runs the shards of a step (`Placement.run_shards`), and gathers parameters for
the code that reads them. Every placement adds gradients in the order of `onefold.core.fold`, so
the placement never affects the result.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from itertools import chain
from operator import itemgetter
from typing import TYPE_CHECKING, Any

import torch

from onefold.checks.values import CheckInterval, Samples, ValueGuard
from onefold.core.assignment import Assignment, Devices
from onefold.core.call_digest import Call
from onefold.core.late import load
from onefold.core.placements import implementation_of
from onefold.core.randomness import OwnGenerators, kept_generators
from onefold.core.results import Gradients, ShardResult
from onefold.core.settings import Settings
from onefold.core.storage import Storage
from onefold.data_order.kept_state import generators_in
from onefold.exchange.exchange import Exchange
from onefold.exchange.memory import Start
from onefold.exchange.shard_table import ShardTable
from onefold.shard.kernels import Compilers, repeatable_kernels
from onefold.shard.model_parts import ModelParts
from onefold.shard.replica import Replica
from onefold.shard.task import ShardTask
from onefold.system.accelerator import as_current
from onefold.system.allocator import DEFAULT_ALLOCATOR, TensorAllocator
from onefold.update.optimizer import PartitionedOptimizer
from onefold.watch.timing import Phase

if TYPE_CHECKING:
    from onefold.placement.footprint import Footprint
    from onefold.placement.pipeline.shape_stages import LossProgress
    from onefold.shard.stage_modules import StageModules

__all__ = [
    "Before",
    "Done",
    "Estimates",
    "Function",
    "Placement",
    "PlacementLayout",
    "ResidentParameters",
    "StepContext",
    "StepTotals",
    "placement_of",
]


Function = Callable[[torch.nn.Module, Any], object]
"""Function of the model and one shard."""

Done = Mapping[int, ShardResult]
"""Results of shards that have already run, by number."""

Estimates = Mapping[str, int | None]
"""Bytes of memory by the form of ``--placement``; None for too many devices."""

Before = Callable[[Replica], AbstractContextManager[object]]
"""Context manager around all shards of one device."""


@dataclass(frozen=True, slots=True)
class PlacementLayout:
    """The way a placement cuts a model, decided before memory is allocated."""

    modules: StageModules | None = None
    """Stages whose gradients are reduced one stage at a time; None if partial sums of all are."""
    allocator: TensorAllocator = DEFAULT_ALLOCATOR
    """Allocator of the model's memory on the host."""
    early: StageModules | None = None
    """Stages whose partial sums are sent during backward, if the model is large enough for that."""
    mirrors: bool = False
    """Whether each device then updates all parameters, if the optimizer allows it."""


@dataclass(frozen=True, slots=True)
class StepTotals:
    """Sums over the shards of a step."""

    segments: Sequence[torch.Tensor | None]
    """Summed gradient of each segment that this process updates, shaped like the segment; None if
    no shard computed one. Valid until parameters are published."""
    gave: Sequence[int]
    """Number of shards that computed a gradient, for each trained parameter."""
    whole: Gradients | None = None
    """Gradients of the whole batch as backward left them, if this process has them."""


class ResidentParameters:
    """The parameters of a model if each device has all of them for the whole run.

    Subclasses gather parameters in these methods if devices keep only a part of them.
    """

    progress: LossProgress | None = None
    """Progress of a pipeline's device in the current shard; None outside pipelines."""

    @property
    def partitioned(self) -> Sequence[torch.nn.Parameter]:
        """Parameters without values at this moment, numbered as in `Storage.partitioned_layout`."""
        return ()

    def gathered(self, *, detect_writes: bool = False) -> AbstractContextManager[None]:
        """Gather all parameters in this process for a block; called on all devices.

        Args:
            detect_writes: whether to detect writes to trained parameters at the end of the block.

        Raises:
            StateError: parameters were written to, and the writes would be lost.
        """
        return nullcontext()

    def forward(self, function: Function) -> AbstractContextManager[Function]:
        """Surround forward passes without backward; devices may run different numbers of them.

        Yields:
            The function, which gathers parameters while they are needed.
        """
        return nullcontext(function)

    def stay_gathered(self) -> None:
        """Gather all parameters permanently; called on all devices."""

    def refuse_call(self, call: Call) -> None:
        """Raise an error if a trainer call is made while other devices serve gathers.

        Raises:
            RuntimeError: a shard is being computed whose parameters are gathered.
        """

    def rounds(self, task: ShardTask) -> AbstractContextManager[ShardTask]:
        """Surround the shards of a step, in which all devices take part in rounds.

        Yields:
            The task, which gathers parameters while they are needed.
        """
        return nullcontext(task)

    def in_pipeline(self, *, run_checks: bool) -> AbstractContextManager[None]:
        """Surround the shards of a step that go through a pipeline.

        Args:
            run_checks: whether costly checks run in this step.
        """
        return nullcontext()

    def read_stages(
        self, read: Callable[[Mapping[str, torch.Tensor]], Mapping[str, str]]
    ) -> dict[int, str]:
        """Read all parameters of `partitioned`, each on one device; called on all devices.

        Args:
            read: function of parameters by name, which returns a line of text for each name.

        Returns:
            The lines of all devices, by parameter number.
        """
        return {}


class Placement(ABC):
    """Placement of parameters, gradients and optimizer state, and how a step computes with them.

    Methods are called in this order: `layout` and `check` before memory is allocated, `distribute`
    and `start` afterwards; then in each step `compute`, which calls `run_shards`, and `publish`.
    All devices of a run make the same calls.

    Args:
        devices: all devices of the run.
        settings: the settings of the run.
    """

    def __init__(self, devices: Devices, settings: Settings) -> None:
        self.devices, self.settings = devices, settings
        self.parameters: ResidentParameters = ResidentParameters()
        """Access to the parameters; `start` may replace it."""
        self.context: StepContext

    @classmethod
    def simplest(cls, devices: Devices, settings: Settings) -> type[Placement]:
        """Return the simplest type that computes the same for these devices and settings."""
        return cls

    @classmethod
    def estimate(cls, sizes: Footprint, devices: int, *, together: bool) -> Estimates:
        """Estimate the memory of one device, before a run.

        Args:
            sizes: sizes of the model.
            devices: number of devices.
            together: whether devices share memory, as CPU devices of a host do.

        Returns:
            Bytes, by the form of ``--placement``; None if it cannot use this many devices. A name
            that ends in ``:file`` gives the size of a file of all devices.
        """
        return {}

    def layout(
        self, parts: ModelParts, stages: Sequence[torch.nn.Module] | None
    ) -> PlacementLayout:
        """Decide how to cut a model, before memory is allocated.

        Args:
            parts: the model.
            stages: modules at which it may be cut; None to choose them automatically.

        Raises:
            ValueError: this placement does not support the model or the settings.
        """
        return PlacementLayout()

    def check(self, storage: Storage) -> None:  # noqa: B027 (most models fit)
        """Check that a model fits on a device, once its sizes are known.

        Raises:
            ValueError: a part of it is larger than a device.
        """

    def distribute(
        self, start: Start, update: PartitionedOptimizer, exchange: Exchange, assignment: Assignment
    ) -> None:
        """Send the lead's values to owners whose models lack them, or round them."""
        if exchange.memory.is_partitioned:
            entries = load("placement.distribute").distribute_entries
            entries(start, update, exchange, leads=self.devices.has_lead)
        elif update.storage.rounds:
            masters = load("placement.distribute").distribute_masters
            masters(start, update, exchange, assignment, self.devices)

    def start(self, context: StepContext) -> None:
        """Bind to the run's memory, which now contains the model."""
        self.context = context

    @abstractmethod
    def run_shards(self, task: ShardTask, done: Done, before: Before) -> Gradients | None:
        """Compute this process's shards, and send their gradients.

        Args:
            task: the task that all shards of the step share.
            done: results of shards that have already run; their gradients are added to in place.
            before: context manager around all shards of a device.

        Returns:
            The gradients of the whole batch as backward left them, if there is only one shard;
            otherwise None.

        Raises:
            LossError, GradientError, StateError: see `Replica.compute`.
            PeerError: another device is lost or has failed.
        """

    def compute(self, task: ShardTask, done: Done, before: Before) -> StepTotals:
        """Compute the shards of a step, and sum the gradients of the segments that this process
        owns.

        Arguments and errors are those of `run_shards`.
        """
        context = self.context
        whole = self.run_shards(task, done, before)
        if not self.may_write(task.shards):
            # Before `collect`, so that no process updates with results of such parameters.
            context.guard.refuse_writing(task.step, values=context.checks.run_checks)
        with context.timed("exchange", "collect"):
            context.exchange.collect(task.batch.shares)
        segments = [total for n in context.own for total in context.exchange.totals(n)]
        return StepTotals(segments, context.table.times_given(), whole)

    def publish(self) -> None:
        """Publish the updated parameters to all devices and release the gradient memory."""
        self.context.exchange.publish_parameters()

    def may_write(self, shards: int) -> bool:
        """Return whether a loss may write to parameters: only with a single shard, as in a plain
        loop."""
        # Writes to gathered parameters are lost.
        return shards == 1 and not self.context.exchange.memory.is_partitioned

    def written(self) -> bool:
        """Return whether models see other values than owners keep, if both have separate memory."""
        update = self.context.update
        if not self.context.exchange.memory.is_partitioned or not update.is_whole:
            return False
        return update.shown_otherwise() is not None

    def leave(self, *, together: bool) -> None:
        """Keep all parameters in this process, if memory allows.

        Args:
            together: whether all devices call this, so that it may gather.
        """
        if together:
            self.parameters.stay_gathered()

    @property
    def partitioned(self) -> Sequence[torch.nn.Parameter]:
        """See `ResidentParameters.partitioned`."""
        return self.parameters.partitioned

    def gathered(self, *, detect_writes: bool = False) -> AbstractContextManager[None]:
        """See `ResidentParameters.gathered`."""
        return self.parameters.gathered(detect_writes=detect_writes)


def placement_of(devices: Devices, settings: Settings) -> Placement:
    """Make the placement of a run.

    Args:
        devices: all devices; their options name the placement.
        settings: the settings of the run.
    """
    found: type[Placement] = implementation_of(devices.context.options.placement)
    return found.simplest(devices, settings)(devices, settings)


class StepContext:
    """The devices of this process, and the objects that they share with the whole run.

    Args:
        replicas: the model on each device of this process.
        exchange: exchange with all devices.
        update: the optimizer on this process's partitions.
        settings: the settings of the run.
        compilers: compilers used in the model and its losses.
    """

    def __init__(
        self,
        replicas: Sequence[Replica],
        exchange: Exchange,
        update: PartitionedOptimizer,
        settings: Settings,
        compilers: Compilers,
    ) -> None:
        self.replicas, self.exchange, self.update = replicas, exchange, update
        self.settings, self.compilers = settings, compilers
        self.first = first = replicas[0]
        """The model on the first device of this process, which the script sees."""
        self.checks = CheckInterval()
        """Decides which steps run costly checks."""
        self.guard = ValueGuard(first.parts.named, exchange.memory.resident(first.number))
        """Values of the parameters after the last call, to detect changes."""
        self._others = replicas[1:]
        self.begun: list[Callable[..., object]] = []
        """Functions that restore what the current call has changed; each may be called twice."""
        self._samples = [Samples([r.trained, r.other]) for r in self._others]

    @property
    def parts(self) -> ModelParts:
        """The model's trained and other parts."""
        return self.first.parts

    @property
    def module(self) -> torch.nn.Module:
        """The user's model."""
        return self.first.module

    @property
    def table(self) -> ShardTable:
        """Results of all shards of a step, except their gradients."""
        return self.exchange.table

    @property
    def own(self) -> list[int]:
        """Numbers of this process's devices."""
        return [replica.number for replica in self.replicas]

    @property
    def devices(self) -> int:
        """Number of devices in the whole run."""
        return self.exchange.table.storage.devices

    @property
    def with_others(self) -> bool:
        """Whether other processes take part."""
        return len(self.replicas) < self.devices

    @property
    def alone(self) -> bool:
        """Whether the run has only one device."""
        return self.devices == 1

    @property
    def leads(self) -> bool:
        """Whether this process has device 0."""
        return self.first.number == 0

    @contextmanager
    def attached(self, replica: Replica) -> Iterator[None]:
        """Move the module to one of this process's devices, and afterwards back to the first
        one."""
        try:
            if replica is not self.first:
                replica.attach()
            with as_current(replica.device):
                yield
        finally:
            replica.buffers.restore()
            if replica is not self.first:
                self.first.attach()

    @contextmanager
    def computing(self, *, run_checks: bool = True) -> Iterator[None]:
        """Set up the state for running models; generators and kernels are restored on exit."""
        self.first.check_places()
        generators = kept_generators(*(replica.device for replica in self.replicas))
        kernels = repeatable_kernels(wanted=self.settings.deterministic, may_compile=run_checks)
        self.begun = [kernels.__exit__, generators.__exit__]
        with generators, kernels, self.compilers.settled():
            self.first.buffers.begin_step()
            # Append these only now: earlier, they would restore the buffers of the step before.
            self.begun += [self.first.attach, self.first.buffers.restore]
            self.follow_first()
            yield
        self.begun = []

    def restore(self) -> None:
        """Restore what a call has changed; its exception may have cut that short."""
        for restore in self.begun:
            restore()
        self.begun = []

    def undo(self, task: ShardTask) -> None:
        """Undo an interrupted step in the model, and in the settings of the process."""
        self.restore()
        self.first.put_back(task)

    def find_generators(self, *functions: object) -> None:
        """Find the generators that functions and the model can reach; each shard seeds them."""
        self._seed_by_shard(OwnGenerators(generators_in(*functions, self.module)))

    def _seed_by_shard(self, own: OwnGenerators) -> None:
        for replica in self.replicas:
            replica.own_generators = own

    def keeping_generators(self) -> AbstractContextManager[None]:
        """Restore these generators after a block."""
        own = self.first.own_generators
        return own.kept() if own.all else nullcontext()

    @contextmanager
    def with_generators_of(self, *functions: object) -> Iterator[None]:
        """Seed the generators of other functions than the losses inside a block."""
        before = self.first.own_generators
        self.find_generators(*functions)
        try:
            with self.keeping_generators():
                yield
        finally:
            self._seed_by_shard(before)

    def timed(self, phase: Phase, label: str) -> AbstractContextManager[None]:
        """Measure the duration of a block on the first device of this process."""
        return self.first.watch.timed(phase, label)

    def of_all_shards(self, own: Mapping[int, Any]) -> dict[int, Any]:
        """Gather values of all shards from all processes, by shard number; called on all devices.

        Args:
            own: values of this process's shards, by number, of types that `onefold.core.encoding`
                supports.
        """
        given = dict.fromkeys(self.own, ()) | {self.first.number: tuple(own.items())}
        found = chain.from_iterable(self.exchange.transport.all_gather_values(given))
        return dict(sorted(found, key=itemgetter(0)))

    def follow_first(self) -> None:
        """Copy the user's changes to the model since the last step to the other devices."""
        # Buffers are few and change in most steps, so copy them unconditionally. The exchange
        # already published parameters, so copy them only if they were written to since.
        for replica in self._others:
            replica.buffers.begin_as(self.first.buffers)
        if self._others and (self.guard.changed() or self._differ()):
            self.copy_first()
            # Otherwise the script's changes would be attributed to the shards that run next.
            self.guard.note()

    def copy_first(self) -> None:
        """Copy the first device's parameters to the others of this process."""
        for replica in self._others:
            replica.trained.copy_(self.first.trained)
            replica.other.copy_(self.first.other)

    def _differ(self) -> bool:
        """Return whether a device of this process has other values, as far as they are sampled."""
        run_checks, first = self.checks.run_checks, self.guard.samples
        # The guard keeps no values of a GPU, and cannot detect changes there through .data.
        if not (run_checks or first.on_host):
            return False
        here = first.add_up() if run_checks else first.read()
        return any(here != (s.add_up() if run_checks else s.read()) for s in self._samples)
