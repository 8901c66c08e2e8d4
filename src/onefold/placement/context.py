"""This process's part of a run: what each step, and each pass over data, computes with."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from itertools import chain
from operator import itemgetter
from typing import Any

import torch

from onefold.checks.values import CheckInterval, Samples, ValueGuard
from onefold.core.randomness import kept_generators
from onefold.core.settings import Settings
from onefold.exchange.exchange import Exchange
from onefold.exchange.shard_table import ShardTable
from onefold.shard.kernels import Compilers, repeatable_kernels
from onefold.shard.model_parts import ModelParts
from onefold.shard.replica import Replica
from onefold.system.accelerator import as_current
from onefold.update.optimizer import PartitionedOptimizer
from onefold.watch.timing import Phase

__all__ = ["StepContext"]


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

    def timed(self, phase: Phase, label: str) -> AbstractContextManager[None]:
        """A block of which the first device of this process notes how long it takes."""
        return self.first.watch.timed(phase, label)

    def of_all_shards(self, own: Mapping[int, Any]) -> dict[int, Any]:
        """What all processes have of their shards, in the order of these; called on all devices.

        Args:
            own: for shards of this process, by number, what `onefold.core.wire` knows.
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
