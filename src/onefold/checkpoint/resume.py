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

import logging
import platform
import uuid
from collections.abc import Callable, Collection, Mapping
from contextlib import ExitStack
from dataclasses import dataclass, field
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
from onefold.checkpoint.jsonvalue import from_bytes, from_json, to_bytes, to_json
from onefold.checkpoint.model import (
    ModelCopy,
    ModelFiles,
    check_model_can_be_saved,
    copy_model,
)
from onefold.checkpoint.optimizer import join, pack, take_apart, unpack
from onefold.engine import Engine
from onefold.errors import CheckpointError
from onefold.exchange.base import roomy
from onefold.fingerprint import fingerprint_of, named_tensors, tensor_digests
from onefold.head import Call
from onefold.position import PROMISES, Position, check_same
from onefold.schedule import read_schedule, write_schedule
from onefold.team import Team

__all__ = ["Checkpoint", "Checkpoints", "Keeping"]

_log = logging.getLogger("onefold")

_LOOK_S = 1.0
"""How often the devices that wait for a checkpoint hear that it is still being written."""
_WITH_SCHEDULE = ("lr", "initial_lr")
"""Settings of an optimizer that a schedule owns."""
_OF_THE_SCRIPT = ("capturable", "differentiable", "foreach", "fused")
"""Settings that say how a device computes, and so stay those of the run that goes on."""
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
    """What tells later which checkpoints of a run stay in their directory."""

    newest: int | None
    """How many of the newest stay; with None, this one stays for good."""
    best: str | None = None
    """The rule by which another one stays, as `Best.read` has it."""
    scores: Mapping[str, float] = field(default_factory=dict)
    """Of this checkpoint."""

    @classmethod
    def checked(cls, newest: int | None, best: str | None, scores: Mapping[str, float]) -> Keeping:
        """From what a user gives.

        Raises:
            TypeError, ValueError: it is not usable.
        """
        if newest is not None and (isinstance(newest, bool) or not isinstance(newest, int)):
            raise TypeError(f"expected keep to be a whole number or None, got {newest!r}")
        if newest is not None and newest < 1:
            raise ValueError(f"expected keep of at least 1, got {newest}")
        for name, value in scores.items():
            if not isinstance(name, str) or not isinstance(value, int | float):
                raise TypeError(f"expected scores to be numbers by name, got {name!r}: {value!r}")
        if best is not None and Best.read(best).score not in scores:
            raise ValueError(
                f"best is {best!r}: expected a score of that name among scores, which has "
                f"{list(scores)}"
            )
        return cls(newest, best, {name: float(value) for name, value in scores.items()})


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
        self._settings_at_start = _settings_if_any(self._optimizer)
        self._writing = Background("writing a checkpoint")
        self._model_room: torch.Tensor | None = None

    def save(
        self,
        directory: Path,
        *,
        keeping: Keeping,
        wait: bool,
        extra: object = None,
    ) -> Path:
        """Write a checkpoint of the run as it is now; see `Trainer.save`.

        Args:
            directory: of the checkpoints of the run.
            keeping: which of them stay.
            wait: until it is on the disk.
            extra: of the user, as JSON.
        """
        folder = folder_of(directory, self._position.step)
        self._engine.agree(
            Call.SAVE,
            self._position.step + 1,
            arguments=(keeping.newest, keeping.best, sorted(keeping.scores), wait),
        )
        record = self._record(keeping, extra)
        self._engine.check_last_step()
        self._writing.wait()
        self._meet()  # until the lead has written what lies in everybody's rooms
        pack(self._engine.update.states(), self._engine.exchange.room)
        brought = self._engine.exchange.bring()
        if self._leads:
            model = copy_model(self._module, self._room)
            self._writing.start(partial(self._write, folder, record, model, brought, keeping))
        while wait and not self._is_written():
            pass  # however long it takes: the others wait for word, and not for the writing
        self._position.note_save()
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
        self._engine.agree(Call.LOAD, self._position.step + 1, arguments=(sorted(changed), if_any))
        with ExitStack() as stack:
            told, files = self._find(path, changed, if_any, stack) if self._leads else (None, None)
            stored = self._agree_on(told)
            if stored is None:
                return None
            self._take_model(files)
            self._take_optimizer(stored.run["optimizer"], files, changed)
        if self._schedule is not None and "schedule" not in changed:
            read_schedule(self._schedule, stored.run["schedule"])
        self._position.go_to(stored.run, changed)
        self._run = stored.run["run"]
        self._check_fingerprint(stored)
        if self._leads:
            self._warn_of_differences(stored)
        return Checkpoint(
            folder=stored.folder,
            step=self._position.step,
            epoch=self._position.epoch,
            scores=from_json(stored.run["scores"]),
            extra=from_json(stored.run["extra"]),
        )

    def misses_a_schedule(self) -> bool:
        """Whether a schedule is attached to the optimizer that checkpoints do not hold."""
        return self._schedule is None and hasattr(self._optimizer.step, "_wrapped_by_lr_sched")

    def check_can_be_saved(self) -> None:
        """Refuse at the start what the first save would refuse.

        Raises:
            TypeError: the model or the optimizer holds what no file can hold.
        """
        check_model_can_be_saved(self._module)
        _settings(self._optimizer)

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
        self._share(0.0)

    def _share(self, number: float) -> torch.Tensor:
        """A number of each device, (D, 1) float64; waits for all of them."""
        devices = self._team.own_devices
        return self._engine.exchange.share(
            {n: torch.tensor([number], dtype=torch.float64, device=d) for n, d in devices.items()}
        )

    def _is_written(self) -> bool:
        """Whether the lead has written its checkpoint; all devices ask, and hear the same."""
        done = self._writing.done_within(_LOOK_S) if self._leads else True
        return bool(self._share(float(done))[0] > 0)

    def _room(self, nbytes: int) -> torch.Tensor:
        self._model_room = roomy(self._model_room, nbytes, self._engine.replicas[0].device)
        return self._model_room

    # Saving

    def _record(self, keeping: Keeping, extra: object) -> dict[str, Any]:
        """What ``run.json`` says, but for what is known only when the files are written."""
        return {
            "format": FORMAT,
            "run": self._run,
            **self._state(),
            "scores": to_json(dict(keeping.scores), "scores"),
            "keep": keeping.newest,
            "best": keeping.best,
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
                "settings": _settings(self._optimizer),
                "settings_at_start": self._settings_at_start,
            },
        }

    def _group_names(self) -> list[list[str]]:
        names = {id(p): name for name, p in named_tensors(self._module).items()}
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
        record["optimizer"] |= {"tensors": joined.keys, "other_state": joined.values}
        saved, rest = model.parts()
        files = {"model.safetensors": saved, "optimizer.safetensors": joined.tensors}
        if rest:
            files["buffers.safetensors"] = rest
        write_checkpoint(folder, files, lambda: {**record, "fingerprint": model.fingerprint()})
        if keeping.newest is not None:
            prune(folder.parent, run=record["run"], keep=keeping.newest)

    # Going on

    def _find(
        self, path: Path, changed: Collection[str], if_any: bool, stack: ExitStack
    ) -> tuple[Callable[[int], torch.Tensor], _Files | None]:
        """On the lead: the checkpoint, checked, or why there is none; for all to hear."""
        if if_any and not has_checkpoints(path):
            return _told(None), None
        try:
            found = find_checkpoint(path)
            files = _Files(found, stack)
            try:
                files.model.check(self._module)
                self._check_fits(found.run, changed)
            except CheckpointError as error:
                raise CheckpointError(f"{found.folder} does not fit: {error}") from None
        except CheckpointError as error:
            return _told({"error": str(error)}), None
        return _told({"folder": str(found.folder), "run": found.run}), files

    def _agree_on(self, told: Callable[[int], torch.Tensor] | None) -> StoredCheckpoint | None:
        """What the lead has found; if that is an error, all raise it alike."""
        said, _ = from_bytes(self._engine.exchange.hand_out(told))
        if said is None:
            return None
        if "error" in said:
            raise CheckpointError(said["error"])
        return StoredCheckpoint(Path(said["folder"]), said["run"])

    def _check_fits(self, run: Mapping[str, Any], changed: Collection[str]) -> None:
        here = self._state()
        for name in ("seed", "shards", "clip_norm"):
            check_same(name, run[name], here[name], changed, name)
        one, other = run["optimizer"], here["optimizer"]
        check_same("optimizer", one["class"], other["class"], changed, "optimizer")
        groups = len(one["settings"]), len(other["settings"])
        check_same("optimizer", *groups, changed=changed, name="a number of parameter groups of")
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
        self._engine.replicas[0].buffers.absorb()
        if files is not None:
            files.model.fill(self._module)
        self._engine.exchange.follow_lead(self._engine.replicas[0].buffers.flat)
        self._engine.model_loaded()

    def _take_optimizer(
        self, saved: Mapping[str, Any], files: _Files | None, changed: Collection[str]
    ) -> None:
        """State and settings; those that a schedule owns come and go with the schedule."""
        kept = set(_OF_THE_SCRIPT)
        if "optimizer" in changed:
            self._engine.update.take_states(())
            only = set(_WITH_SCHEDULE) if self._schedule is not None else set()
        else:
            make = None if files is None else partial(self._pieces_for, saved, files)
            self._engine.update.take_states(unpack(self._engine.exchange.hand_out(make)))
            only = {key for values in saved["settings"] for key in values}
        if "schedule" in changed:
            kept |= set(_WITH_SCHEDULE)
        for group, values in zip(self._optimizer.param_groups, saved["settings"], strict=False):
            taken = {key: from_json(v) for key, v in values.items() if key in only - kept}
            group.update(taken)

    def _pieces_for(self, saved: Mapping[str, Any], files: _Files, first: int) -> torch.Tensor:
        """What the process whose first device this is needs of the optimizer's state."""
        storage = self._engine.update.storage
        devices = self._team.own if first in self._team.own else (first,)
        owned = chain.from_iterable(storage.spans[device] for device in devices)
        states = take_apart(
            saved["tensors"],
            saved["other_state"],
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
            raise RuntimeError(
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
        pairs = zip(run["optimizer"]["settings_at_start"], self._settings_at_start, strict=False)
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


def _settings(optimizer: torch.optim.Optimizer) -> list[dict[str, Any]]:
    """The settings of an optimizer's groups, as JSON."""
    return [
        {
            key: to_json(value, f"{key} of the optimizer's group {number}")
            for key, value in group.items()
            if key not in ("params", "param_names")
        }
        for number, group in enumerate(optimizer.param_groups)
    ]


def _settings_if_any(optimizer: torch.optim.Optimizer) -> list[dict[str, Any]]:
    """The settings with which a run begins; what cannot be saved is refused when it is."""
    try:
        return _settings(optimizer)
    except TypeError:
        return []


def _told(said: object) -> Callable[[int], torch.Tensor]:
    """The same for everybody."""
    text = to_bytes(said)
    return lambda device: torch.frombuffer(bytearray(text), dtype=torch.uint8)
