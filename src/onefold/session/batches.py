"""The batches of a run: its loaders, and step batches cut into shards."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

from onefold.core.assignment import Devices
from onefold.core.batch import ShardedBatch, checked_dim, cut_batch
from onefold.core.late import load
from onefold.core.shard import Shares
from onefold.data_order.loader import Loader
from onefold.data_order.position import Position
from onefold.data_order.reader import Collate
from onefold.step.engine import Engine
from onefold.step.hook import ScriptCall
from onefold.watch.timing import Moment, host_now_s

__all__ = ["Batches", "Wait", "read_now"]

Wait = tuple[Moment, Moment]
"""Start and end of a step's wait for its batch."""


class Batches:
    """Creates the loaders of a run, and cuts the batches of its steps.

    Args:
        engine: engine of this process's devices.
        devices: devices of the run.
        position: current position of the run.
        gather: gathers the payloads of a batch's shards to every device.
    """

    def __init__(
        self,
        engine: Engine,
        devices: Devices,
        position: Position,
        gather: Callable[[ShardedBatch], Any],
    ) -> None:
        self._engine, self._devices, self._position = engine, devices, position
        self._settings, self._gather = engine.context.settings, gather
        self.note_reading: Callable[[bool], None] = lambda reads: None
        """Called at the start and the end of a wait for a loader's batch."""
        self.datasets: dict[int, Any] = {}
        """Data sets of the loaders for steps, by loader number."""

    def loader(
        self, dataset: Any, collate: Collate | None, *, whole: bool = False, **choices: Any
    ) -> Loader:
        """Create a loader for `evaluate` and `predict`.

        Args:
            dataset, collate, choices: see `Loader`.
            whole: whether the first device computes each batch as one shard.
        """
        # In a row: each device computes one contiguous slice of the batch.
        choices |= {"dataset": dataset, "collate": collate}

        def shares() -> Shares:
            usual = self._engine.assignment.shares.in_a_row()
            return Shares.whole(devices=usual.devices) if whole else usual

        choices["shares"] = shares
        return self._asked(ScriptCall("pass", given=choices), lambda: self._made(**choices))

    def loader_of_steps(self, dataset: Any, collate: Collate | None, **choices: Any) -> Loader:
        """Create a loader for `step`, whose position is part of a checkpoint."""
        choices |= {"shares": lambda: self._engine.assignment.shares, "gather": self._gather}
        choices |= {"dataset": dataset, "collate": collate}

        def make() -> Loader:
            made = self._made(**choices)
            self._position.add(made.track)
            self.datasets[made.track.number] = dataset
            return made

        return self._asked(ScriptCall("loader", given=choices), make)

    def _asked(self, asked: ScriptCall, make: Callable[[], Loader]) -> Loader:
        made: Loader = self._engine.hooks.call(asked, make)
        return made

    def _made(self, dataset: Any, collate: Collate | None, **choices: Any) -> Loader:
        made = Loader(
            dataset,
            **choices,
            collate=collate,
            seed=self._settings.seed,
            own=lambda: self._devices.own,
            first_epoch=self._position.epoch,
            pin_memory=self._devices.all[0].type != "cpu",
            timeout_s=self._settings.timeout_s,
        )
        made.note_reading = self.note_reading
        return made

    def cut(self, batch: object, dim: int) -> tuple[ShardedBatch, Wait]:
        """Cut a step's batch; return it with the start and end of the wait for it."""
        start, shares = host_now_s(), self._engine.assignment.shares
        dim = checked_dim(dim)
        if isinstance(batch, ShardedBatch):
            cut = self._checked(batch, shares)
            cut = cut if cut.dim == dim else replace(cut, dim=dim)
        else:
            own = [s for number in self._devices.own for s in shares.read_by(number)]
            cut = cut_batch(
                batch,
                shares,
                own,
                self._position.epoch,
                digest=self._engine.context.with_others,
                dim=dim,
            )
            for part in cut.parts:
                self._checked(part, shares)
        if cut.samples == 0:
            raise ValueError("the batch is empty, but a step needs at least one sample")
        if cut.samples < shares.shards and not self._position.step:
            load("shard.advice").say_few(cut.samples, shares.shards)
        if cut.others and self._settings.microbatch is not None:
            raise ValueError(
                "microbatch cuts each shard by samples, but this batch has parts of other lengths "
                "(another loader's batch, onefold.Scatter or onefold.Broadcast). Pass "
                "microbatch=None, and use more shards instead: each is smaller"
            )
        return cut, cut.waited or (start, host_now_s())

    def _checked(self, batch: ShardedBatch, ours: Shares) -> ShardedBatch:
        theirs = batch.shares
        if (theirs.shards, theirs.devices) != (ours.shards, ours.devices):
            raise ValueError(
                f"the batch was cut for {theirs.shards} shards and {theirs.devices} devices, but "
                f"this run has {ours.shards} and {ours.devices}. Use a loader of this trainer"
            )
        self._position.check(batch)
        return batch


def read_now(part: Any) -> Any:
    """Read a batch that a loader returned unread during replay."""
    return part.unread() if isinstance(part, ShardedBatch) and part.unread else part
