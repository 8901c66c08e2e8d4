"""Where parameters, gradients and optimizer state lie, and how a step computes with them.

`Placement` is what a run asks; ``--placement`` chooses one of its types. `ResidentParameters` is
how parameters are reached where each device has all of them. `StepContext` is this process's part
of a run: what each step, and each pass over data, computes with.

Note: what differs between placements
-------------------------------------
Agreement, losses, verdict, clipping, update, checkpoints and passes over data are the same for all.
A placement decides how the model is cut before there is memory (`Placement.layout`), runs the
shards of a step (`Placement.run_shards`), and brings parameters to whoever reads them. Gradients
are added in the order of `onefold.core.fold` in each of them, so a placement never shows in the
result.
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
"""Takes the model and one shard."""

Done = Mapping[int, ShardResult]
"""The results of shards that have run already, by number."""

Estimates = Mapping[str, int | None]
"""Bytes of memory by the form of ``--placement``; None for too many devices."""

Before = Callable[[Replica], AbstractContextManager[object]]
"""Surrounds all shards of one device."""


@dataclass(frozen=True, slots=True)
class PlacementLayout:
    """How a placement cuts a model, before there is memory for it."""

    modules: StageModules | None = None
    """After which stages gradients are handed over; None if partial sums of all of them are."""
    allocator: TensorAllocator = DEFAULT_ALLOCATOR
    """Where the model lies on the host."""
    early: StageModules | None = None
    """After which stages of whole partial sums are sent while backward goes on, if the model is
    large enough for that."""
    mirrors: bool = False
    """Whether each device then updates all parameters, if the optimizer allows for it."""


@dataclass(frozen=True, slots=True)
class StepTotals:
    """What the shards of a step add up to."""

    segments: Sequence[torch.Tensor | None]
    """The summed gradient of each segment that this process updates, shaped as the segment; None
    where no shard gave one. Valid until parameters are published."""
    gave: Sequence[int]
    """For each trained parameter, the number of shards that gave it a gradient."""
    whole: Gradients | None = None
    """The gradients of the whole batch as backward left them, if this process has them."""


class ResidentParameters:
    """The parameters of a model of which each device has all, for the whole run.

    Its methods surround what gathers parameters where devices have a part of them.
    """

    progress: LossProgress | None = None
    """How far a device of a pipeline has come in the shard that it computes, if it does."""

    @property
    def partitioned(self) -> Sequence[torch.nn.Parameter]:
        """Those that have no values here just now, as `Storage.partitioned_layout` numbers them."""
        return ()

    def gathered(self, *, detect_writes: bool = False) -> AbstractContextManager[None]:
        """A block in which this process has all parameters; called on all devices alike.

        Args:
            detect_writes: whether to detect writes to trained parameters when the block ends.

        Raises:
            StateError: parameters were written to, which is not kept.
        """
        return nullcontext()

    def forward(self, function: Function) -> AbstractContextManager[Function]:
        """Surround forward passes without a backward, of which each device has as many as it has.

        Yields:
            The function, which then gathers parameters while they are needed.
        """
        return nullcontext(function)

    def stay_gathered(self) -> None:
        """Have all parameters from here on; called on all devices alike."""

    def refuse_call(self, call: Call) -> None:
        """Refuse a call of the trainer where other devices wait for other things.

        Raises:
            RuntimeError: it was made while a shard is computed whose parameters are gathered.
        """

    def rounds(self, task: ShardTask) -> AbstractContextManager[ShardTask]:
        """Surround the shards of a step, in which all devices take part in rounds.

        Yields:
            The task, which then gathers parameters while they are needed.
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
        """Read all parameters of `partitioned`, each on one device; called on all devices together.

        Args:
            read: called with parameters by name; returns a line of text for each name.

        Returns:
            The lines of all devices, by the parameter's number.
        """
        return {}


class Placement(ABC):
    """Where parameters, gradients and optimizer state lie, and how a step computes with them.

    The methods are called in this order: `layout` and `check` before there is memory, `distribute`
    and `start` once there is; then in each step `run_shards`, by `compute`, and `publish`. All
    devices of a run call them alike.

    Args:
        devices: all devices of the run.
        settings: the settings of the run.
    """

    def __init__(self, devices: Devices, settings: Settings) -> None:
        self.devices, self.settings = devices, settings
        self.parameters: ResidentParameters = ResidentParameters()
        """How parameters are reached; `start` may replace it."""
        self.context: StepContext

    @classmethod
    def simplest(cls, devices: Devices, settings: Settings) -> type[Placement]:
        """Return the type that does the same for these devices and settings with least work."""
        return cls

    @classmethod
    def estimate(cls, sizes: Footprint, devices: int, *, together: bool) -> Estimates:
        """Estimate the memory of one device, before a run.

        Args:
            sizes: of the model.
            devices: how many there are.
            together: whether they share memory, as CPU devices of a host do.

        Returns:
            Bytes, by the form of ``--placement``; None if it cannot use so many devices. A name
            that ends in ``:file`` is for a file of all devices.
        """
        return {}

    def layout(
        self, parts: ModelParts, stages: Sequence[torch.nn.Module] | None
    ) -> PlacementLayout:
        """Decide how a model is cut, before there is memory for it.

        Args:
            parts: the model.
            stages: at which modules it may be cut; None to find that out.

        Raises:
            ValueError: the model or the settings do not go with this placement.
        """
        return PlacementLayout()

    def check(self, storage: Storage) -> None:  # noqa: B027 (most models fit)
        """Refuse a model that fits on no device, once its sizes are known.

        Raises:
            ValueError: a part of it is larger than a device.
        """

    def distribute(
        self, start: Start, update: PartitionedOptimizer, exchange: Exchange, assignment: Assignment
    ) -> None:
        """Bring the lead's values to owners whose models have none, or rounded ones."""
        if exchange.memory.is_partitioned:
            entries = load("placement.distribute").distribute_entries
            entries(start, update, exchange, leads=self.devices.has_lead)
        elif update.storage.rounds:
            masters = load("placement.distribute").distribute_masters
            masters(start, update, exchange, assignment, self.devices)

    def start(self, context: StepContext) -> None:
        """Take over the run's memory, in which the model lies now."""
        self.context = context

    @abstractmethod
    def run_shards(self, task: ShardTask, done: Done, before: Before) -> Gradients | None:
        """Compute this process's shards, and hand their gradients over.

        Args:
            task: what all shards of the step have in common.
            done: the results of shards that have run already; their gradients are added to in
                place.
            before: surrounds all shards of a device.

        Returns:
            The gradients of the whole batch, if one shard is all and they are as backward left
            them.

        Raises:
            LossError, GradientError, StateError: see `Replica.compute`.
            PeerError: another device is lost or has failed.
        """

    def compute(self, task: ShardTask, done: Done, before: Before) -> StepTotals:
        """Compute the shards of a step, and add up the gradients of what this process owns.

        Arguments and errors are those of `run_shards`.
        """
        context = self.context
        whole = self.run_shards(task, done, before)
        if not self.may_write(task.shards):
            # Before `collect`: no process must update with what was computed of such parameters.
            context.guard.refuse_writing(task.step, values=context.checks.run_checks)
        with context.timed("exchange", "collect"):
            context.exchange.collect(task.batch.shares)
        segments = [total for n in context.own for total in context.exchange.totals(n)]
        return StepTotals(segments, context.table.times_given(), whole)

    def publish(self) -> None:
        """Have every device see the updated parameters; the memory of gradients is free again."""
        self.context.exchange.publish_parameters()

    def may_write(self, shards: int) -> bool:
        """Whether a loss may write to parameters, as in a plain loop: if one shard is all."""
        # What is written to parameters that were gathered is lost.
        return shards == 1 and not self.context.exchange.memory.is_partitioned

    def written(self) -> bool:
        """Whether models see other values than owners keep, where both have memory of their own."""
        update = self.context.update
        if not self.context.exchange.memory.is_partitioned or not update.is_whole:
            return False
        return update.shown_otherwise() is not None

    def leave(self, *, together: bool) -> None:
        """Have this process keep all parameters, as far as there is room for them.

        Args:
            together: whether all devices call this, and may be waited for.
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
    """The devices of this process, and what they have in common with all others of the run.

    Args:
        replicas: the model on each device of this process.
        exchange: with all devices.
        update: the optimizer on this process's partitions.
        settings: the settings of the run.
        compilers: what has a part in the model and its losses.
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
        """Decides in which steps costly checks run."""
        self.guard = ValueGuard(first.parts.named, exchange.memory.resident(first.number))
        """Remembers the parameters as the last call left them."""
        self._others = replicas[1:]
        self._samples = [Samples([r.trained, r.other]) for r in self._others]

    @property
    def parts(self) -> ModelParts:
        """The model, divided into what is trained and the rest."""
        return self.first.parts

    @property
    def module(self) -> torch.nn.Module:
        """The user's model."""
        return self.first.module

    @property
    def table(self) -> ShardTable:
        """What all shards of a step have returned beside their gradients."""
        return self.exchange.table

    @property
    def own(self) -> list[int]:
        """The numbers of this process's devices."""
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
        """Whether there is only one device in the whole run."""
        return self.devices == 1

    @property
    def leads(self) -> bool:
        """Whether this process has device 0."""
        return self.first.number == 0

    @contextmanager
    def attached(self, replica: Replica) -> Iterator[None]:
        """Have the module compute on one of this process's devices, and afterwards on the first."""
        if replica is not self.first:
            replica.attach()
        try:
            with as_current(replica.device):
                yield
        finally:
            replica.buffers.restore()
            if replica is not self.first:
                self.first.attach()

    @contextmanager
    def computing(self, *, run_checks: bool = True) -> Iterator[None]:
        """Set the state in which models run; generators and kernels are put back afterwards."""
        self.first.check_places()
        with (
            kept_generators(*(replica.device for replica in self.replicas)),
            repeatable_kernels(deterministic=self.settings.deterministic, may_compile=run_checks),
            self.compilers.settled(),
        ):
            self.first.buffers.begin_step()
            self.follow_first()
            yield

    def undo(self, task: ShardTask) -> None:
        """Restore the model as it was before a step that broke off; may be called at any time."""
        if self._others:
            self.first.attach()
        self.first.buffers.restore()
        self.first.put_back(task)

    def find_generators(self, *functions: object) -> None:
        """Find the generators that functions and the model reach; each shard seeds them."""
        self._seed_by_shard(OwnGenerators(generators_in(*functions, self.module)))

    def _seed_by_shard(self, own: OwnGenerators) -> None:
        for replica in self.replicas:
            replica.own_generators = own

    def keeping_generators(self) -> AbstractContextManager[None]:
        """Put these generators back after a block."""
        own = self.first.own_generators
        return own.kept() if own.all else nullcontext()

    @contextmanager
    def with_generators_of(self, *functions: object) -> Iterator[None]:
        """Seed the generators of other functions than the losses in a block."""
        before = self.first.own_generators
        self.find_generators(*functions)
        try:
            with self.keeping_generators():
                yield
        finally:
            self._seed_by_shard(before)

    def timed(self, phase: Phase, label: str) -> AbstractContextManager[None]:
        """A block of which the first device of this process notes how long it takes."""
        return self.first.watch.timed(phase, label)

    def of_all_shards(self, own: Mapping[int, Any]) -> dict[int, Any]:
        """What all processes have of their shards, in the order of these; called on all devices.

        Args:
            own: for shards of this process, by number, what `onefold.core.encoding` knows.
        """
        given = dict.fromkeys(self.own, ()) | {self.first.number: tuple(own.items())}
        found = chain.from_iterable(self.exchange.transport.all_gather_values(given))
        return dict(sorted(found, key=itemgetter(0)))

    def follow_first(self) -> None:
        """Bring what the user did to the model since the last step to the other devices."""
        # Buffers are few and change in most steps, so they are copied without looking; parameters
        # were brought by the exchange, and are copied only if somebody has written to them since.
        for replica in self._others:
            replica.buffers.begin_as(self.first.buffers)
        if self._others and (self.guard.changed() or self._differ()):
            self.copy_first()
            # Or what the script has changed would count as changed by the shards that run next.
            self.guard.note()

    def copy_first(self) -> None:
        """Copy the first device's parameters to the others of this process."""
        for replica in self._others:
            replica.trained.copy_(self.first.trained)
            replica.other.copy_(self.first.other)

    def _differ(self) -> bool:
        """Whether a device of this process has other values, as far as values are looked at."""
        run_checks, first = self.checks.run_checks, self.guard.samples
        # The guard keeps no values of a GPU, and cannot see what was changed there through .data.
        if not (run_checks or first.on_host):
            return False
        here = first.add_up() if run_checks else first.read()
        return any(here != (s.add_up() if run_checks else s.read()) for s in self._samples)
