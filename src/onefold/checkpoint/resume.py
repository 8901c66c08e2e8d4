"""Saves a run, and resumes it on any devices.

Note: how a run is saved
------------------------
Between two steps, every process copies its part of the optimizer state into private memory, the
lead copies the model, and the copies are gathered to the lead. Training waits only for these
copies. The lead then joins and writes them, in the background on request. The writer reads the
copies until the files are on disk, so the next checkpoint's copies must wait for it.

Note: how a run is resumed
--------------------------
Only the lead reads files. It checks everything before anything changes, and scatters to each
process the values that it needs. An error is broadcast too, so that all devices raise the same one.
Finding a checkpoint and applying it are two calls: `load` makes both at once, and
`onefold.tools.answers` makes the second one later.
"""

from __future__ import annotations

import json
import logging
import math
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from itertools import chain
from pathlib import Path
from typing import Any

import torch

from onefold.checkpoint.folder import (
    Checkpoint,
    Keeping,
    StoredCheckpoint,
    find_checkpoint,
    folder_of,
    has_checkpoints,
)
from onefold.checkpoint.manifest import Place, check_run
from onefold.checkpoint.model import StoredStates, left_by_shard, saved_rule
from onefold.checkpoint.run_state import Advice, RunState
from onefold.checkpoint.saving import LeadWork, Saving
from onefold.checks.model import readable
from onefold.core.assignment import Devices
from onefold.core.call_digest import Call, CallDigest, digest
from onefold.core.encoding import from_json
from onefold.core.flat import fingerprint_of
from onefold.core.settings import PROMISES
from onefold.data_order.position import Position, Reached
from onefold.errors import CheckpointError
from onefold.passes.averaged import Averaging
from onefold.passes.collectives import agreed_digests, broadcast, written
from onefold.placement.base import StepContext
from onefold.step.engine import Engine
from onefold.system.background import Background
from onefold.system.words import listed
from onefold.update.averages import AVERAGE
from onefold.update.optimizers import name_of, settings_of
from onefold.update.scheduler import RunScheduler
from onefold.update.state import check_kinds, unpack

__all__ = ["Checkpoints", "LoadedCheckpoint"]

_log = logging.getLogger("onefold")
_ADVICE = Advice(where="after trainer.load", anew="trainer.load(..., allow_changed=['scheduler'])")


@dataclass(frozen=True, slots=True)
class LoadedCheckpoint:
    """A checkpoint that is complete and fits the run."""

    stored: StoredCheckpoint
    files: StoredStates | None
    """The open files of the checkpoint, on the lead only."""
    allow_changed: Collection[str]
    """Names in `PROMISES` of settings that may differ."""


class RepeatedChanges:
    """Finds settings of an optimizer that a script changes again after `Trainer.load`.

    What runs between the first loop and the rest of a pass that the saved run used has run there,
    too, so the checkpoint includes its changes. A pass that sets a value in each step is right.

    Args:
        optimizer: optimizer of the run.
        position: current position of the run.
    """

    def __init__(self, optimizer: torch.optim.Optimizer, position: Position) -> None:
        self._optimizer, self._position = optimizer, position
        self._then: Callable[[Reached], None] | None = None
        """What the position called before, while this is watching."""
        # After the load, at the first loop, at the last such rest, and at the last pass.
        self._loaded: list[dict[str, Any]] = []
        self._before: list[dict[str, Any]] = []
        self._after: list[dict[str, Any]] = []
        self._latest: list[dict[str, Any]] = []

    def watch(self) -> None:
        """Begin at the script's next loop. Changes before it are deliberate."""
        self._loaded = settings_of(self._optimizer)
        self._before = self._after = []
        if self._then is None:
            self._then, self._position.reached = self._position.reached, self._reached

    def _reached(self, where: Reached) -> None:
        if self._then is not None:
            self._then(where)
        self._latest = settings_of(self._optimizer)
        self._before = self._before or self._latest
        if where == "rest":
            self._after = self._latest

    def at_step(self) -> list[str]:
        """Return, in words, the changes that are still in effect in the first step."""
        if self._then is None:
            return []
        self._position.reached, self._then = self._then, None
        found = self._loaded, self._before, self._after, self._latest, settings_of(self._optimizer)
        return [
            f"{key} {from_json(now[key])} in the optimizer's group {number}, where the checkpoint "
            f"has {from_json(was[key])}"
            for number, (was, before, after, latest, now) in enumerate(zip(*found, strict=False))
            for key in sorted(was.keys() & before.keys() & after.keys())
            if not _is_same(before[key], after[key])
            and not _is_same(was[key], after[key])
            and latest.get(key) == now.get(key)
        ]


def _is_same(one: object, other: object) -> bool:
    """Whether two settings are the same, apart from the rounding of another expression."""
    numbers = isinstance(one, float) and isinstance(other, float)
    return math.isclose(one, other) if numbers else one == other  # type: ignore[arg-type]


class Checkpoints:
    """Saves and loads the state of one trainer. All devices make the same calls.

    It may be created as late as the first call: a checkpoint's data about earlier steps is stored
    elsewhere.

    Args:
        engine: engine of this process's devices.
        averaging: holds the averages of the model.
        devices: devices of the run.
        position: current position of the run.
        scheduler: scheduler of the run, if any, and when it is stepped.
        note: records the start of a checkpoint, given its step, its folder and the calling line;
            returns the count and digest of the recorded entries.
    """

    def __init__(
        self,
        engine: Engine,
        averaging: Averaging,
        devices: Devices,
        position: Position,
        scheduler: RunScheduler,
        note: Callable[[int, Path, str], Mapping[str, Any]],
    ) -> None:
        self._engine, self._averaging = engine, averaging
        self._devices = devices
        self._position = position
        self._scheduler = scheduler
        self._lead = LeadWork(engine, devices, engine.context.settings.timeout_s)
        self._state = RunState(engine, averaging, devices, position, scheduler)
        self._writing = Background("writing a checkpoint")
        self._saving = Saving(engine, averaging, self._lead, self._writing)
        self._repeats = RepeatedChanges(engine.context.update.optimizer, position)
        self._otherwise: tuple[list[set[str]], list[str]] = [], []
        """Settings to which a replayed script gives other values than the saved one did."""
        self.lost = False
        """Whether the last checkpoint could not be written."""
        self.recorded = 0
        """Number of recorded entries that the loaded checkpoint includes."""
        self._note = note
        self.kept: Callable[[], Mapping[str, torch.Tensor]] = dict
        """Returns copies of weights that the script refers to, by name. Called on the lead."""

    @property
    def _context(self) -> StepContext:
        return self._engine.context

    @property
    def run(self) -> str:
        """Name of the run. A resumed run keeps it."""
        return self._state.run

    def save(
        self,
        directory: Path,
        *,
        keeping: Keeping,
        wait: bool,
        extra: object = None,
        place: Place = None,
        line: str = "",
    ) -> Path:
        """Write a checkpoint of the run as it is now; see `Trainer.save`.

        Args:
            directory: directory of the run's checkpoints.
            keeping: rule by which checkpoints are kept.
            wait: whether to wait until the checkpoint is on disk.
            extra: the user's own data, as JSON.
            place: position of the script; None for a call of the script's own.
            line: line of the script that requests the checkpoint; empty if none does.
        """
        folder = folder_of(directory, self._position.step)
        self.check_savable()
        arguments = (keeping.newest, keeping.best, sorted(keeping.scores), wait)
        self._engine.agree(
            CallDigest(Call.SAVE, self._position.step + 1, arguments=digest(arguments))
        )
        # Record the state now: the writer thread must not read a run that has moved on.
        recorded = self._note(self._position.step, folder, line)
        record = self._state.record(keeping, extra, place, recorded)
        self._engine.check_last_step()
        # The previous write still reads the rooms of all devices, which `pack` is about to
        # overwrite.
        self._wait_until_written()
        with readable(self._context.module, self._engine.placement.gathered):
            self._saving.refuse_not_finite(self._position.step)
            self._engine.follow_parameters()
            self.lost = False
            waits = self._saving.start(folder, record, self.kept() if self._lead.is_here else {})
        if wait or waits:
            self._wait_until_written()
        if line or not recorded["entries"]:  # otherwise a resumed script is replayed up to here
            self._position.note_save()
        return folder

    def on_written(self, call: Callable[[Path], None]) -> None:
        """Call a function with each complete checkpoint, in the thread that wrote it."""
        self._saving.written = call

    def check_savable(self) -> None:
        """Raise if the optimizer has state that no checkpoint can hold.

        Raises:
            TypeError: a state tensor is of a tensor subclass.
        """
        update = self._context.update
        check_kinds(update.state, name_of(update.optimizer))

    def load(
        self, path: Path, *, allow_changed: Collection[str] = (), if_any: bool = False
    ) -> Checkpoint | None:
        """Resume from a checkpoint immediately; see `Trainer.load` and `find`."""
        found = self.find(path, allow_changed=allow_changed, if_any=if_any)
        if found is None:
            return None
        self._load(found)
        self._position.go_to(found.stored.run, found.allow_changed)
        self.adopt_run(found)
        self._repeats.watch()
        run = found.stored.run
        return Checkpoint(
            folder=found.stored.folder,
            step=self._position.step,
            epoch=self._position.epoch,
            scores=from_json(run["scores"]),
            extra=from_json(run["extra"]),
        )

    def find(
        self,
        path: Path,
        *,
        allow_changed: Collection[str] = (),
        if_any: bool = False,
        leave_out: int = 0,
    ) -> LoadedCheckpoint | None:
        """Find a checkpoint and check that it fits, without changing anything.

        Args:
            path: a checkpoint, or a directory of checkpoints.
            allow_changed: names in `PROMISES` of settings that may differ.
            if_any: whether to return None if the directory contains no checkpoint.
            leave_out: number of newest checkpoints to skip, as long as an older one remains.
        """
        unknown = sorted(set(allow_changed) - PROMISES.keys())
        if unknown:
            raise ValueError(
                f"allow_changed must contain only names from {list(PROMISES)}, but got {unknown}"
            )
        self._begin_loading(digest((sorted(allow_changed), if_any)))
        with readable(self._context.module, self._engine.placement.gathered):
            find = partial(self._find, path, allow_changed, if_any, leave_out)
            found, files = self._lead.do("checking a checkpoint", find) or (None, None)
        # Broadcast the lead's result; if it is an error, all devices raise it.
        text = written(json.dumps(found)) if self._lead.is_here else None
        chosen = json.loads(broadcast(self._context.exchange, text))
        if chosen is None:
            return None
        if "error" in chosen:
            raise CheckpointError(chosen["error"])
        return LoadedCheckpoint(
            StoredCheckpoint(Path(chosen["folder"]), chosen["run"]), files, allow_changed
        )

    def kept_of(self, found: LoadedCheckpoint) -> dict[str, torch.Tensor]:
        """Broadcast the copies of weights that the script of a checkpoint referred to."""
        read = None if found.files is None else found.files.kept
        kept = self._lead.do("reading weights that the script kept", read)
        if not self._context.with_others:
            return kept or {}
        text = None if kept is None else written(kept)
        brought: dict[str, torch.Tensor] = broadcast(self._context.exchange, text)
        return brought

    def adopt_run(self, found: LoadedCheckpoint, advice: Advice = _ADVICE) -> None:
        """Adopt the saved run's name, and warn about differences.

        Args:
            found: the checkpoint.
            advice: instructions for the user in the warnings.
        """
        # Under the same name, pruning treats the checkpoints of both as one run's.
        self._state.run = found.stored.run["run"]
        self.recorded = found.stored.run["recorded"]["entries"]
        if self._lead.is_here:
            self._state.warn_of_differences(found.stored, found.allow_changed, advice)

    def take(self, found: LoadedCheckpoint, *, settings: bool = True) -> None:
        """Load a checkpoint into the model, the optimizer and the scheduler.

        Args:
            found: the checkpoint.
            settings: whether to load the scheduler and the optimizer's settings too.
        """
        self._begin_loading(digest(found.stored.run["fingerprint"]))
        self._load(found, settings=settings)

    def start_as_saved(self, found: LoadedCheckpoint) -> None:
        """Begin the replay of a script with the initial settings of the one that saved the run."""
        self._otherwise = self._state.given_otherwise(found.stored.run, found.allow_changed)
        self._state.start_as(found.stored.run)

    def take_given_otherwise(self, found: LoadedCheckpoint) -> None:
        """Load the settings to which this script gives other values than the saved one did.

        All other settings keep the script's values, which equal the saved ones.
        """
        run, allow_changed = found.stored.run, found.allow_changed
        groups, scheduler = self._otherwise
        if scheduler:
            self._scheduler.go_on(run, allow_changed)
            groups = self._state.taken(run["optimizer"]["settings"], allow_changed)
        self._take_settings(run["optimizer"]["settings"], groups)

    def _take_settings(
        self, saved: Sequence[Mapping[str, Any]], taken: Sequence[Collection[str]]
    ) -> None:
        groups = self._context.update.optimizer.param_groups
        for group, keys, values in zip(groups, taken, saved, strict=False):
            group.update({key: from_json(v) for key, v in values.items() if key in keys})

    def _begin_loading(self, arguments: int) -> None:
        self._context.update.end_step()  # an interrupted one
        self._engine.agree(CallDigest(Call.LOAD, self._position.step + 1, arguments=arguments))
        self._wait_until_written()

    def _load(self, found: LoadedCheckpoint, *, settings: bool = True) -> None:
        stored, files, allow_changed = found.stored, found.files, found.allow_changed
        with readable(self._context.module, self._engine.placement.gathered):
            # The trainer changes from here on: all checks that can fail are done.
            self._engine.agreement.torn = "trainer.load"
            self._take_model(files)
            self._take_optimizer(files)
            self._take_buffers(stored.run, files, allow_changed)
            now, expected = fingerprint_of(agreed_digests(self._engine)), stored.run["fingerprint"]
        if now != expected:
            raise RuntimeError(
                f"after loading {stored.folder}, the model's fingerprint is {now} instead of "
                f"{expected}: the model changes values that are written to it"
            )
        if settings:
            saved = stored.run["optimizer"]["settings"]
            self._take_settings(saved, self._state.taken(saved, allow_changed))
            self._scheduler.go_on(stored.run, allow_changed)
        self._state.adopt(stored.run, allow_changed)
        self._engine.agreement.torn = ""

    def check_step(self, loss: str) -> None:
        """Warn once if a step trains or sets something else than the loaded run did."""
        self._state.check_trained(loss)
        changed = self._repeats.at_step()
        if changed and self._lead.is_here:
            _log.warning(
                "step %d has %s. The script changed this after trainer.load, in a part of its loop "
                "that the checkpoint includes: a line such as `if epoch == 1: lr *= 0.1` acts "
                "twice. Set the value itself, as in `if epoch >= 1: lr = 0.01`, or use onefold run "
                "--checkpoint, which replays such lines",
                self._position.step + 1,
                listed(changed),
            )

    def check(self) -> None:
        """Re-raise the exception of a finished write, without waiting."""
        with self._noting_loss():
            self._writing.wait(limit_s=0)

    def finish(self) -> None:
        """Wait until everything is written, and re-raise the exception of the write."""
        with self._noting_loss():
            self._writing.wait()

    def _wait_until_written(self) -> None:
        """Wait on all devices until the lead has written everything."""
        with self._noting_loss():
            self._lead.wait_for(self._writing)

    @contextmanager
    def _noting_loss(self) -> Iterator[None]:
        """Note that the write failed: if the script continues, its end is saved again."""
        try:
            yield
        except BaseException:
            self.lost = True
            raise

    def _find(
        self, path: Path, allow_changed: Collection[str], if_any: bool, leave_out: int
    ) -> tuple[object, StoredStates | None]:
        """Find and check a checkpoint on the lead; return what to broadcast, and its files."""
        if if_any and not has_checkpoints(path):
            return None, None
        try:
            found = find_checkpoint(path, leave_out=leave_out)
            try:
                check_run(found.run)
            except ValueError as error:
                raise CheckpointError(
                    f"{found.folder} is damaged: its run.json is invalid: {error}"
                ) from error
            storage, carried = (
                self._context.update.storage,
                self._context.first.buffers.carried.indices,
            )
            allocator = self._context.exchange.memory.allocator
            files = StoredStates(found, storage, carried, allow_changed, allocator)
            try:
                # Before the model, because another precision has parameters of another dtype.
                self._state.check_precision(found.run, allow_changed)
                files.model.check(self._context.module)
                self._state.check_fits(found.run, allow_changed)
                files.check()
                files.model.check_fingerprint(self._context.module, found.run["fingerprint"])
            except (CheckpointError, ValueError) as error:
                raise CheckpointError(f"{found.folder} does not fit: {error}") from None
        except CheckpointError as error:
            return {"error": str(error)}, None
        return {"folder": str(found.folder), "run": found.run}, files

    def _take_model(self, files: StoredStates | None) -> None:
        # The script may have replaced the module's buffers. Absorb them into flat memory, which the
        # lead fills and the others follow.
        self._context.first.buffers.absorb()
        # Partitioned parameters go to their owners, with the optimizer state.
        but = frozenset(map(id, self._engine.placement.partitioned))
        fill = None if files is None else partial(files.model.fill, self._context.module, but=but)
        self._lead.do("reading a model", fill)
        self._context.exchange.memory.broadcast_from_lead(self._context.first.buffers.flat)
        self._engine.model_loaded()

    def _take_optimizer(self, files: StoredStates | None) -> None:
        """Load the optimizer state."""
        partitions = self._engine.assignment.partitions
        if self._context.update.storage.mirrors:
            partitions = (range(len(self._context.update.storage.segments)),) * len(partitions)
        make = None if files is None else partial(self._for_owner, files.segments, partitions)
        shown = self._take_values(files) if self._engine.placement.partitioned else None
        self._context.update.take_states(unpack(self._lead.scatter_from_lead(make)), shown)

    def _take_buffers(
        self, run: Mapping[str, Any], files: StoredStates | None, allow_changed: Collection[str]
    ) -> None:
        """Load the averages, and the shards' own buffers."""
        make = None if files is None else lambda device: files.buffers()
        states = list(unpack(self._lead.scatter_from_lead(make)))
        # Owners of segments already have the averages of parameters.
        averages = [state for state in states if state.key == AVERAGE]
        rule = saved_rule(run, allow_changed)
        self._averaging.loaded(rule, run["average"]["steps"] if rule else 0, averages)
        if self._context.first.buffers.carried.indices:
            left = [state for state in states if state.key != AVERAGE]
            self._context.first.buffers.carried.go_on(left_by_shard(left))

    def _take_values(self, files: StoredStates | None) -> dict[int, torch.Tensor]:
        """Receive the values that this process stores; return the trained ones, by segment."""
        engine = self._engine
        storage, frozen = engine.context.update.storage, engine.context.exchange.memory.frozen
        kept = storage.kept(engine.assignment.partitions)
        make = None if files is None else partial(self._for_owner, files.values, kept)
        trained = {}
        for state in unpack(self._lead.scatter_from_lead(make)):
            if frozen is not None and state.segment >= len(storage.segments):
                frozen.part(state.segment).copy_(state.value)
            else:
                # Clone, because the next scatter may reuse this memory.
                trained[state.segment] = state.value.clone()
        return trained

    def _for_owner(
        self,
        packed: Callable[[Iterable[int]], torch.Tensor],
        partitions: Sequence[Sequence[int]],
        first: int,
    ) -> torch.Tensor:
        """Pack the segments of the process whose first device is ``first``."""
        own = self._devices.own if first in self._devices.own else (first,)
        return packed(chain.from_iterable(partitions[device] for device in own))
