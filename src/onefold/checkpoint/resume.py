"""Saves a run and goes on from what was saved, whoever takes part then.

Note: how a run is saved
------------------------
Between two steps every process copies its part of the optimizer's state into memory of its own, the
lead copies the model, and the copies are brought to the lead; that is all that training waits for.
The lead then joins and writes them, beside training if it is asked to. Before the copies of the
next checkpoint are made, the files of this one are on the disk.

When a run goes on, the lead alone reads files. It checks all before anything is changed, and hands
out what each process needs.
"""

from __future__ import annotations

import json
import logging
import platform
import uuid
from collections.abc import Callable, Collection, Mapping
from contextlib import ExitStack
from dataclasses import dataclass
from functools import partial
from importlib.metadata import version
from itertools import chain
from pathlib import Path
from typing import Any

import torch
from torch.optim.lr_scheduler import LRScheduler

from onefold.assembly import Settings
from onefold.checkpoint.background import Background
from onefold.checkpoint.folder import (
    FORMAT,
    Best,
    StoredCheckpoint,
    find_checkpoint,
    folder_of,
    has_checkpoints,
    prune,
    write_checkpoint,
)
from onefold.checkpoint.jsonvalue import from_json, to_json
from onefold.checkpoint.model import ModelCopy, ModelFiles, copy_model
from onefold.checkpoint.optimizer import join, pack, take_apart, unpack
from onefold.engine import Engine
from onefold.errors import CheckpointError
from onefold.exchange.base import roomy
from onefold.fingerprint import fingerprint_of, named_tensors, tensor_digests
from onefold.position import PROMISES, Position, check_same
from onefold.schedule import read_schedule, write_schedule
from onefold.team import Team

__all__ = ["Checkpoint", "Checkpoints", "Keeping"]

_log = logging.getLogger("onefold")

_LIBRARIES = ("onefold", "torch", "numpy", "safetensors")


@dataclass(frozen=True, slots=True)
class Checkpoint:
    """What a run goes on from."""

    folder: Path
    """Where it lies."""
    step: int
    """Steps that were done."""
    epoch: int
    """The epoch that the run goes on in."""
    scores: Mapping[str, float]
    """Given to `Trainer.save`."""
    extra: Any
    """Given to `Trainer.save`."""


@dataclass(frozen=True, slots=True)
class Keeping:
    """Which checkpoints of a run stay in their directory."""

    newest: int | None
    """How many; None for all."""
    best: Best | None
    """And this one."""


class Checkpoints:
    """The checkpoints of one trainer.

    Args:
        engine: the devices of this process.
        settings: of the run.
        team: who takes part.
        position: where the run is.
        schedule: of the run, if it has one.
    """

    def __init__(
        self,
        engine: Engine,
        settings: Settings,
        team: Team,
        position: Position,
        schedule: LRScheduler | None,
    ) -> None:
        self._engine = engine
        self._settings = settings
        self._team = team
        self._position = position
        self._schedule = schedule
        self._run = uuid.uuid4().hex
        self._begun_with = _begun_with(self._optimizer)
        self._writing = Background("writing a checkpoint")
        self._model_room: torch.Tensor | None = None

    def save(
        self,
        directory: Path,
        *,
        scores: Mapping[str, float],
        keeping: Keeping,
        wait: bool,
        extra: object,
    ) -> Path:
        """Write a checkpoint of the run as it is now; see `Trainer.save`."""
        folder = folder_of(directory, self._position.step)
        record = self._record(scores, extra)
        self._engine.check_last_step()
        self._writing.wait()
        self._meet()  # until the lead has written what lies in everybody's rooms
        pack(self._engine.update.states(), self._engine.exchange.room)
        brought = self._engine.exchange.bring()
        if self._leads:
            model = copy_model(self._module, self._room)
            self._writing.start(partial(self._write, folder, record, model, brought, keeping))
        if wait:
            self._writing.wait()
            self._meet()
        return folder

    def load(
        self, path: Path, *, changed: Collection[str] = (), if_any: bool = False
    ) -> Checkpoint | None:
        """Go on from a checkpoint; see `Trainer.load`.

        Args:
            path: of a checkpoint, or a directory of them.
            changed: those of `PROMISES` that may differ.
            if_any: where the directory holds none, do nothing, and return None.
        """
        unknown = sorted(set(changed) - PROMISES.keys())
        if unknown:
            raise ValueError(f"expected changed to name some of {list(PROMISES)}, got {unknown}")
        self._writing.wait()
        with ExitStack() as stack:
            found, files = self._find(path, changed, if_any, stack) if self._leads else (None, None)
            told = _told(found) if self._leads else None
            stored = _heard(self._engine.exchange.hand_out(told))
            if stored is None:
                return None
            self._take_model(files)
            if "optimizer" not in changed:
                self._take_optimizer(stored.run["optimizer"], files)
        if self._schedule is not None and "schedule" not in changed:
            read_schedule(self._schedule, stored.run["schedule"])
        self._position.go_to(stored.run, changed)
        self._run = stored.run["run"]
        if self._leads:
            self._check_fingerprint(stored)
            self._warn_of_differences(stored)
        return Checkpoint(
            folder=stored.folder,
            step=self._position.step,
            epoch=self._position.epoch,
            scores=stored.run["scores"],
            extra=stored.run["extra"],
        )

    def check(self) -> None:
        """Raise what has failed in the background; does not wait."""
        self._writing.check()

    def finish(self) -> None:
        """Wait until all is written, and raise what has failed."""
        self._writing.wait()

    @property
    def _leads(self) -> bool:
        return 0 in self._team.own

    @property
    def _module(self) -> torch.nn.Module:
        return self._engine.replicas[0].module

    @property
    def _optimizer(self) -> torch.optim.Optimizer:
        return self._engine.update.optimizer

    def _meet(self) -> None:
        devices = self._team.own_devices
        self._engine.exchange.share(
            {n: torch.zeros(1, dtype=torch.float64, device=d) for n, d in devices.items()}
        )

    def _room(self, nbytes: int) -> torch.Tensor:
        self._model_room = roomy(self._model_room, nbytes, self._engine.replicas[0].device)
        return self._model_room

    # Saving

    def _record(self, scores: Mapping[str, float], extra: object) -> dict[str, Any]:
        """What ``run.json`` says, but for what is known only when the files are written."""
        return {
            "format": FORMAT,
            "run": self._run,
            **self._state(),
            "scores": dict(scores),
            "extra": extra,
            "threads": torch.get_num_threads(),
            "device": self._team.devices[0].type,
            "devices": len(self._team.devices),
            "python": platform.python_version(),
            "libraries": {name: version(name) for name in _LIBRARIES},
        }

    def _state(self) -> dict[str, Any]:
        return {
            **self._position.to_json(),
            "seed": self._settings.seed,
            "shards": self._settings.shards,
            "clip_norm": self._settings.clip_norm,
            "loss_scale": 1.0,
            "schedule": None if self._schedule is None else write_schedule(self._schedule),
            "optimizer": {
                "class": type(self._optimizer).__name__,
                "parameters": self._group_names(),
                "groups": _groups(self._optimizer),
                "begun_with": self._begun_with,
            },
        }

    def _group_names(self) -> list[list[str]]:
        names = {id(p): name for name, p in self._module.named_parameters()}
        return [[names[id(p)] for p in g["params"]] for g in self._optimizer.param_groups]

    def _write(
        self,
        folder: Path,
        record: dict[str, Any],
        model: ModelCopy,
        rooms: list[torch.Tensor],
        keeping: Keeping,
    ) -> None:
        """In the background, from copies alone."""
        storage = self._engine.update.storage
        states = chain.from_iterable(map(unpack, rooms))
        joined = join(states, storage.pieces, storage.trained)
        record["optimizer"] |= {"tensors": joined.keys, "values": joined.values}
        saved, rest = model.parts()
        files = {"model.safetensors": saved, "optimizer.safetensors": joined.tensors}
        if rest:
            files["buffers.safetensors"] = rest
        write_checkpoint(folder, files, lambda: {**record, "fingerprint": model.fingerprint()})
        if keeping.newest is not None:
            prune(folder.parent, run=record["run"], keep=keeping.newest, best=keeping.best)

    # Going on

    def _find(
        self, path: Path, changed: Collection[str], if_any: bool, stack: ExitStack
    ) -> tuple[StoredCheckpoint | None, _Files | None]:
        """On the lead: the checkpoint, checked, and its files."""
        if if_any and not has_checkpoints(path):
            return None, None
        found = find_checkpoint(path)
        try:
            self._check_fits(found.run, changed)
            files = _Files(found, stack)
            files.model.check(self._module)
        except CheckpointError as error:
            error.add_note(f"the checkpoint is {found.folder}")
            raise
        return found, files

    def _check_fits(self, run: Mapping[str, Any], changed: Collection[str]) -> None:
        here = self._state()
        for name in ("seed", "shards", "clip_norm"):
            check_same(name, run[name], here[name], changed, name)
        one, other = run["optimizer"], here["optimizer"]
        check_same("optimizer", one["class"], other["class"], changed, "optimizer")
        before, after = map(_grouped, (one["parameters"], other["parameters"]))
        for name in {**before, **after}:
            said = f"parameter {name} in the optimizer's group"
            check_same("optimizer", before.get(name), after.get(name), changed, said)
        then, now = (s and s["class"] for s in (run["schedule"], here["schedule"]))
        check_same("schedule", then, now, changed, "schedule")
        if run["loss_scale"] != here["loss_scale"]:
            raise CheckpointError(
                f"the checkpoint was saved with losses scaled by {run['loss_scale']}, which this "
                f"version does not do"
            )
        self._position.check_fits(run, changed)

    def _take_model(self, files: _Files | None) -> None:
        for replica in self._engine.replicas:
            replica.buffers.absorb()
        if files is not None:
            files.model.fill(self._module)
        self._engine.exchange.follow_lead(self._engine.replicas[0].buffers.flat)

    def _take_optimizer(self, saved: Mapping[str, Any], files: _Files | None) -> None:
        make = None if files is None else partial(self._pieces_for, saved, files)
        self._engine.update.take_states(unpack(self._engine.exchange.hand_out(make)))
        for group, values in zip(self._optimizer.param_groups, saved["groups"], strict=True):
            group.update({key: from_json(value) for key, value in values.items()})

    def _pieces_for(self, saved: Mapping[str, Any], files: _Files, first: int) -> torch.Tensor:
        """What the process whose first device this is needs of the optimizer's state."""
        storage = self._engine.update.storage
        devices = self._team.own if first in self._team.own else (first,)
        owned = chain.from_iterable(storage.spans[device] for device in devices)
        states = take_apart(
            saved["tensors"],
            saved["values"],
            files.optimizer.read,
            owned,
            storage.pieces,
            storage.trained,
        )
        memory: list[torch.Tensor] = []

        def room(nbytes: int) -> torch.Tensor:
            memory.append(torch.empty(nbytes, dtype=torch.uint8))
            return memory[0]

        pack(list(states), room)
        return memory[0]

    def _check_fingerprint(self, stored: StoredCheckpoint) -> None:
        now = fingerprint_of(tensor_digests(named_tensors(self._module)))
        if now != stored.run["fingerprint"]:
            raise CheckpointError(
                f"{stored.folder} was loaded and the model's fingerprint is {now}, "
                f"{stored.run['fingerprint']} was expected: the model changes the values that are "
                f"written to it"
            )

    def _warn_of_differences(self, stored: StoredCheckpoint) -> None:
        """Tell what does not keep a run from going on, but is worth knowing."""
        run = stored.run
        here = {"device": self._team.devices[0].type, "threads": torch.get_num_threads()}
        here |= {"torch": version("torch")}
        saved = {**run, **run["libraries"]}
        for name, now in here.items():
            if saved[name] != now:
                _log.warning(
                    "%s was saved with %s %s, here it is %s: the mathematics is the same, the bits "
                    "from here on may not be",
                    stored.folder,
                    name,
                    saved[name],
                    now,
                )
        pairs = zip(run["optimizer"]["begun_with"], self._begun_with, strict=False)
        for number, (began, begins) in enumerate(pairs):
            for key in began.keys() & begins.keys():
                if began[key] != begins[key]:
                    _log.warning(
                        "%s of the optimizer's group %d was %s when the run began and is %s in "
                        "this script; the checkpoint's value is used. To change it, set "
                        "optimizer.param_groups[%d][%r] after trainer.load",
                        key,
                        number,
                        began[key],
                        begins[key],
                        number,
                        key,
                    )


class _Files:
    """The open files of a checkpoint."""

    def __init__(self, stored: StoredCheckpoint, stack: ExitStack) -> None:
        names = ("model.safetensors", "buffers.safetensors")
        paths = [path for name in names if (path := stored.path(name)) is not None]
        self.model = stack.enter_context(ModelFiles(*paths))
        optimizer = stored.folder / "optimizer.safetensors"
        self.optimizer = stack.enter_context(ModelFiles(optimizer))


def _grouped(names: list[list[str]]) -> dict[str, int]:
    """The group of each parameter."""
    return {name: number for number, group in enumerate(names) for name in group}


def _groups(optimizer: torch.optim.Optimizer) -> list[dict[str, Any]]:
    """The settings of an optimizer's groups, as JSON."""
    return [
        {
            key: to_json(value, f"{key} of the optimizer's group {number}")
            for key, value in group.items()
            if key not in ("params", "param_names")
        }
        for number, group in enumerate(optimizer.param_groups)
    ]


def _begun_with(optimizer: torch.optim.Optimizer) -> list[dict[str, Any]]:
    """The settings with which a run begins; what cannot be saved is refused when it is."""
    try:
        return _groups(optimizer)
    except TypeError:
        return []


def _told(stored: StoredCheckpoint | None) -> Callable[[int], torch.Tensor]:
    """What the lead says of the checkpoint to everybody."""
    said = None if stored is None else [str(stored.folder), stored.run]
    text = json.dumps(said).encode()
    sized = len(text).to_bytes(8, "little") + text
    return lambda device: torch.frombuffer(bytearray(sized), dtype=torch.uint8)


def _heard(memory: torch.Tensor) -> StoredCheckpoint | None:
    length = int.from_bytes(bytes(memory[:8].tolist()), "little")
    said = json.loads(memory[8 : 8 + length].numpy().tobytes())
    return None if said is None else StoredCheckpoint(Path(said[0]), said[1])
