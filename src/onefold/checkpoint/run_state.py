"""Describes the state of a run as JSON, and checks whether a saved run fits the resuming one."""

from __future__ import annotations

import copy
import inspect
import logging
import math
import platform
import uuid
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import suppress
from importlib.metadata import version
from itertools import compress
from typing import Any, NamedTuple

import numpy as np
import torch
from torch.optim.lr_scheduler import LRScheduler, MultiplicativeLR

from onefold.checkpoint.folder import FORMAT, Keeping, StoredCheckpoint
from onefold.checkpoint.manifest import Place
from onefold.checkpoint.model import saved_rule
from onefold.core.assignment import Devices
from onefold.core.encoding import from_json, to_json
from onefold.core.flat import named_tensors, own_name
from onefold.core.settings import ALLOWED_AS, LossScale, Precision, check_same
from onefold.data_order.position import Position
from onefold.errors import CheckpointError
from onefold.passes.averaged import Averaging
from onefold.step.engine import Engine
from onefold.system.words import listed, message_of
from onefold.update.optimizers import (
    name_of,
    optimizers_in,
    schedulers_in,
    settings_of,
)
from onefold.update.scheduler import RunScheduler

__all__ = ["Advice", "RunState"]

_log = logging.getLogger("onefold")
_OF_THE_SCRIPT = ("capturable", "differentiable", "foreach", "fused")
"""Settings of how a device computes. The resuming script's values are used."""
_WITH_SCHEDULER = ("lr", "initial_lr", "max_lr", "min_lr", "base_momentum", "max_momentum")
"""Optimizer settings that its scheduler sets."""
_LIBRARIES = ("onefold", "torch", "numpy", "safetensors")


class Advice(NamedTuple):
    """Instructions for the user in warnings about a resumed run."""

    where: str
    """Where to set a value that differs from the checkpoint's."""
    anew: str
    """How to restart the scheduler with the script's settings."""


class RunState:
    """Everything about a run that is not a tensor.

    Args:
        engine: engine of this process's devices.
        averaging: holds the averages of the model.
        devices: devices of the run.
        position: current position of the run.
        scheduler: scheduler of the run, if any, and when it is stepped.
    """

    def __init__(
        self,
        engine: Engine,
        averaging: Averaging,
        devices: Devices,
        position: Position,
        scheduler: RunScheduler,
    ) -> None:
        self._devices, self._averaging = devices, averaging
        self._position, self._scheduler = position, scheduler
        self._settings = engine.context.settings
        self._engine, self._optimizer = engine, engine.context.update.optimizer
        self._trained_then: dict[str, list[str]] = {}
        """Parameters that the last step of each loss trained, in a loaded run."""
        self._unchecked: set[str] = set()
        """Losses of these that have had no step since."""
        self.run = uuid.uuid4().hex
        """Name of the run. A resumed run keeps it."""

    def record(
        self, keeping: Keeping, extra: object, place: Place, recorded: Mapping[str, Any]
    ) -> dict[str, Any]:
        """Return the contents of ``run.json``, except entries that depend on the written files."""
        return {
            "format": FORMAT,
            "run": self.run,
            **self._state(),
            "scores": to_json(dict(keeping.scores), "scores"),
            "keep": keeping.newest,
            "best": keeping.best,
            "extra": extra,
            "place": place,
            "recorded": recorded,
            "trained": self._trained(),
            "threads": torch.get_num_threads(),
            "device": self._devices.all[0].type,
            "devices": len(self._devices.all),
            "python": platform.python_version(),
            "libraries": {name: version(name) for name in _LIBRARIES},
        }

    def _state(self) -> dict[str, Any]:
        scale = self._engine.rules.scale
        return {
            **self._position.to_json(),
            **self._settings.saved(),
            # The size that the search found, if there was a search.
            "microbatch": self._engine.microbatches.samples,
            "microbatch_trials": self._engine.microbatches.trials,
            "loss_scale": 1.0 if scale is None else scale.value,
            "good_steps": 0 if scale is None else scale.good_steps,
            "average": self._averaging.to_json(),
            "scheduler": self._scheduler.to_json(),
            "optimizer": {
                "class": name_of(self._optimizer),
                "parameters": self._group_names(),
                "settings": settings_of(self._optimizer),
                "settings_at_start": self._scheduler.optimizer_at_start,
            },
        }

    def _group_names(self) -> list[list[str]]:
        # Groups hold tensors: map them to the model's names by identity.
        names = {id(p): name for name, p in named_tensors(self._engine.context.module).items()}
        return [[names[id(p)] for p in g["params"]] for g in self._optimizer.param_groups]

    def check_precision(self, run: Mapping[str, Any], allow_changed: Collection[str]) -> None:
        """Raise if a saved run used another precision.

        Raises:
            CheckpointError: the precision differs and is not in ``allow_changed``, or cannot be
                changed.
        """
        saved, name = run["precision"], self._settings.precision.name
        check_same("precision", saved, name, allow_changed, "precision")
        if Precision(saved).parameters != self._settings.precision.parameters:
            raise CheckpointError(
                f"the checkpoint has precision {saved!r}, but this run has {name!r}: the "
                f"parameters of these precisions have different dtypes, and onefold does not "
                f"convert them. Resume with the same precision"
            )

    def check_fits(self, run: Mapping[str, Any], allow_changed: Collection[str]) -> None:
        """Raise if this run cannot resume a saved one.

        Raises:
            CheckpointError: the runs differ in a setting that is not in ``allow_changed``.
        """
        here = self._state()
        for name, allowed_as in ALLOWED_AS.items():
            if name != "microbatch":
                check_same(allowed_as, run[name], here[name], allow_changed, name)
        # A run that searches for the size may adopt another search's result, but not a run without
        # one.
        saved, number = run["microbatch"], self._settings.microbatch
        looked = saved is not None or run["microbatch_trials"] is not None
        if number != "auto" or not looked:
            check_same("microbatch", saved, number, allow_changed, "microbatch")
        # A resumed script does not have to request the average again.
        average, asked = saved_rule(run, allow_changed), self._averaging.asked
        if average is not None and asked is not None:
            check_same("average", average.words, asked.words, allow_changed, "an average of")
        one, other = run["optimizer"], here["optimizer"]
        check_same("optimizer", one["class"], other["class"], allow_changed, "optimizer")
        if "optimizer" not in allow_changed:
            self._check_settings(one["settings"])
        groups = len(one["settings"]), len(other["settings"])
        check_same(
            "optimizer",
            *groups,
            allow_changed=allow_changed,
            name="a number of parameter groups of",
        )
        # Compare by name: the same parameters in other groups would silently get other settings.
        before, after = map(_grouped, (one["parameters"], other["parameters"]))
        for name in {**before, **after}:
            what = f"parameter {name} in the optimizer's group"
            check_same("optimizer", before.get(name), after.get(name), allow_changed, what)
        for key, name in (("class", "scheduler"), ("every", "scheduler_every")):
            then, now = (each and each[key] for each in (run["scheduler"], here["scheduler"]))
            check_same("scheduler", then, now, allow_changed, name)
        if "scheduler" not in allow_changed:
            self._scheduler.check_fits(run["scheduler"])
        self._position.check_fits(run, allow_changed)

    def _check_settings(self, saved: Sequence[Mapping[str, Any]]) -> None:
        """Raise if a setting has another type, is not finite, or is invalid for the optimizer."""
        given = optimizers_in(self._optimizer).values()
        kinds = [type(each) for each in given for _ in each.param_groups]
        groups = zip(kinds, self._optimizer.param_groups, saved, strict=False)
        for number, (kind, group, values) in enumerate(groups):
            read = {k: from_json(v) for k, v in values.items() if k not in _OF_THE_SCRIPT}
            for key, value in read.items():
                if not _is_alike(value, group.get(key)):
                    raise CheckpointError(
                        f"{key} of the optimizer's group {number} is {value!r} in the checkpoint "
                        f"but {group.get(key)!r} in this script: both must have the same type"
                    )
            # A scheduler may end at a rate of 0, which some classes reject as an initial rate.
            came = {**group, **{k: v for k, v in read.items() if k != "lr" or v}}
            said = "which is not finite"
            wrong = [k for k in read if not _is_finite(read[k]) and _is_finite(group.get(k, 0))]
            # No check for a class with other arguments, or one that rejects the script's own
            # settings.
            if not wrong and not _refusal(kind, group) and (said := _refusal(kind, came)):
                alone = [k for k in read if k in group and not _refusal(kind, came | {k: group[k]})]
                wrong = alone or [k for k in read if k in group and read[k] is not group[k]]
            if wrong:
                shown = ("is " if len(wrong) == 1 else "are ") + ", ".join(
                    repr(read[k]) for k in wrong
                )
                raise CheckpointError(
                    f"{', '.join(wrong)} of the optimizer's group {number} {shown} in the "
                    f"checkpoint, {said}. Settings must be valid for {kind.__name__}. Resume from "
                    f"another checkpoint, or start with a new optimizer: trainer.load(..., "
                    f"allow_changed=['optimizer'])"
                )

    def taken(
        self, saved: Sequence[Mapping[str, Any]], allow_changed: Collection[str]
    ) -> list[set[str]]:
        """Return, for each optimizer group, the names of the settings to take from the checkpoint.

        Settings that a scheduler sets are taken if and only if the scheduler is.
        """
        each = []
        for follows, values in zip(self._scheduler.followed(), saved, strict=False):
            set_by_scheduler = set(_WITH_SCHEDULER) if follows else set()
            taken = set_by_scheduler if "optimizer" in allow_changed else set(values)
            # This run has no scheduler, but the saved run may have had one.
            if "scheduler" in allow_changed and (follows or self._scheduler.scheduler is None):
                taken -= set(_WITH_SCHEDULER)
            each.append((taken & set(values)) - set(_OF_THE_SCRIPT))
        return each

    def adopt(self, run: Mapping[str, Any], allow_changed: Collection[str]) -> None:
        """Adopt the loss scale and the microbatch size that a saved run found."""
        if self._engine.rules.scale is not None and Precision(run["precision"]).is_scaled:
            self._engine.rules.scale = LossScale(run["loss_scale"], run["good_steps"])
        if self._settings.microbatch == "auto":
            if "microbatch" in allow_changed:
                self._engine.microbatches.search_anew()
            else:
                self._engine.microbatches.adopt(run["microbatch"], run["microbatch_trials"])
        self._trained_then, self._unchecked = dict(run["trained"]), {*run["trained"]}
        for objective in self._engine.objectives.values():
            objective.trained = None

    def _trained(self) -> dict[str, list[str]]:
        """Return, for each loss, the parameters that required gradients in its last step."""
        flags = {name: each.trained for name, each in self._engine.objectives.items()}
        known = {name: self._names(each) for name, each in flags.items() if each is not None}
        return {**self._trained_then, **known}

    def _names(self, flags: Sequence[bool]) -> list[str]:
        return [own_name(name) for name in compress(self._engine.context.parts.named, flags)]

    def check_trained(self, loss: str) -> None:
        """Warn once if a step trains different parameters than the loaded run did."""
        if loss not in self._unchecked:
            return
        self._unchecked.remove(loss)
        then, now = self._trained_then[loss], self._names(self._engine.context.parts.trainable())
        if then == now:
            return
        self._unchecked.clear()
        parts = {
            "trained there and frozen here": [name for name in then if name not in set(now)],
            "frozen there and trained here": [name for name in now if name not in set(then)],
        }
        words = [f"{listed(names)} (was {how})" for how, names in parts.items() if names]
        if self._devices.has_lead:
            _log.warning(
                "step %d trains different parameters than the saved run did: %s. A line such as "
                "`if epoch == 2: unfreeze()` does not run again if the run resumes after it. Set "
                "requires_grad by a condition that stays true, such as `if epoch >= 2:`",
                self._position.step + 1,
                "; ".join(words),
            )

    def warn_of_differences(
        self, stored: StoredCheckpoint, allow_changed: Collection[str], advice: Advice
    ) -> None:
        """Log differences that do not prevent a resume but may matter to the user."""
        run = stored.run
        here = {"device": self._devices.all[0].type, "threads": torch.get_num_threads()}
        here |= {"torch": version("torch")}
        saved = {**run, **run["libraries"]}
        for name, now in here.items():
            if saved[name] != now:
                _log.warning(
                    "%s was saved with %s %s, but this run has %s: the mathematics is the same, "
                    "but later bits may differ",
                    *(stored.folder, name, saved[name], now),
                )
        anew = f", or restart the scheduler with the script's settings: {advice.anew}"
        groups, ours = self.given_otherwise(run, allow_changed)
        saved_groups, scheduler = run["optimizer"]["settings_at_start"], run["scheduler"] or {}
        for number, keys in enumerate(groups):
            began, begins = saved_groups[number], self._scheduler.optimizer_at_start[number]
            for key in sorted(keys):
                name = f"{key} of the optimizer's group {number}"
                place = f"optimizer.param_groups[{number}][{key!r}] {advice.where}"
                if key == "initial_lr":
                    place = f"base_lrs of the scheduler {advice.where}"
                follows = self._scheduler.followed()[number] and key in _WITH_SCHEDULER
                _warn_of(name, began[key], begins[key], place + anew * follows)
        for key in ours:
            was, now = scheduler["settings_at_start"][key], self._scheduler.at_start[key]
            _warn_of(key, was, now, f"{key} {advice.where}{anew}")
        for place, each, state in self._with_saved(run, allow_changed):
            if other := _other_rates(each, state, alone="." not in place):
                _log.warning(
                    "%s is a %s whose function gives the learning rate %s after %d of its steps, "
                    "where the run that saved the checkpoint had %s. A checkpoint contains no "
                    "functions, so this script's function sets the learning rate from here on. To "
                    "continue the saved schedule, give it the values that it had there, such as "
                    "the number of epochs",
                    *(place, type(each).__name__, other[0], state["last_epoch"], other[1]),
                )

    def start_as(self, run: Mapping[str, Any]) -> None:
        """Give a script that is replayed the initial settings of the script that saved the run.

        Its learning rates then take the course that they took there.
        """
        groups, ours = self.given_otherwise(run, ())
        began = run["optimizer"]["settings_at_start"]
        for number, keys in enumerate(groups):
            both = keys | ({"initial_lr"} & began[number].keys())
            values = {key: began[number][key] for key in both}
            self._optimizer.param_groups[number].update(
                {key: from_json(value) for key, value in values.items()}
            )
            # A checkpoint of this run says so, too.
            self._scheduler.optimizer_at_start[number].update(values)
        for place, each, state in self._with_saved(run, ()):
            own = each.state_dict()
            names = {key: f"{place}.{key}" for key in own if f"{place}.{key}" in ours}
            at_start = run["scheduler"].get("settings_at_start", {})
            values = {key: from_json(at_start[name]) for key, name in names.items()}
            if own.get("base_lrs") != state.get("base_lrs"):
                values["base_lrs"] = state["base_lrs"]
            if any(groups) and "_last_lr" in own:
                values["_last_lr"] = [group["lr"] for group in each.optimizer.param_groups]
            if values:
                each.load_state_dict({**own, **values})
            self._scheduler.at_start.update({name: at_start[name] for name in names.values()})

    def _with_saved(
        self, run: Mapping[str, Any], allow_changed: Collection[str]
    ) -> Iterator[tuple[str, LRScheduler, dict[str, Any]]]:
        """Yield each scheduler, also inside of others, with its expression and its saved state."""
        scheduler = self._scheduler.scheduler
        if scheduler is None or "scheduler" in allow_changed:
            return
        state = from_json(run["scheduler"]["state"])
        given = [
            (f"scheduler[{name!r}]" if name else "scheduler", each, state[name] if name else state)
            for name, each in schedulers_in(scheduler).items()
        ]
        # The list grows in the loop.
        for place, each, its in given:
            inside = zip(getattr(each, "_schedulers", ()), its.get("_schedulers", ()), strict=False)
            given += [(f"{place}._schedulers[{n}]", *both) for n, both in enumerate(inside)]
            yield place, each, its

    def given_otherwise(
        self, run: Mapping[str, Any], allow_changed: Collection[str]
    ) -> tuple[list[set[str]], list[str]]:
        """Find the settings to which this script gives other values than the saved one did.

        Returns:
            The names of these settings for each optimizer group, and for the scheduler.
        """
        optimizer, scheduler = run["optimizer"], run["scheduler"] or {}
        taken = self.taken(optimizer["settings"], allow_changed)
        pairs = zip(
            optimizer["settings_at_start"], self._scheduler.optimizer_at_start, taken, strict=False
        )
        groups = [{*_differing(one, two, keys)} for one, two, keys in pairs]
        for each in filter({"lr"}.__le__, groups):
            each.discard("initial_lr")  # it differs alone if a scheduler begins at a rate of 0
        began, begins = scheduler.get("settings_at_start", {}), self._scheduler.at_start
        keys = () if "scheduler" in allow_changed else began.keys()
        return groups, _differing(began, begins, keys)


def _differing(
    began: Mapping[str, Any], begins: Mapping[str, Any], keys: Collection[str]
) -> list[str]:
    """Return the settings that both scripts have, with different values."""
    return sorted(k for k in keys if k in began and k in begins and began[k] != begins[k])


def _warn_of(name: str, was: object, now: object, place: str) -> None:
    _log.warning(
        "%s was %s at the start of the run that saved the checkpoint and is %s in this script; the "
        "checkpoint's value is used. To change it, set %s",
        *(name, from_json(was), from_json(now), place),
    )


def _other_rates(
    scheduler: LRScheduler, saved: Mapping[str, Any], *, alone: bool
) -> tuple[str, str] | None:
    """Compare a saved scheduler's rates with those that functions of this one give there.

    Args:
        scheduler: the script's scheduler.
        saved: state of the saved one.
        alone: whether no other scheduler sets the same rates.

    Returns:
        The rates of the functions, and those of the saved run, if they differ.
    """
    own, code = scheduler.state_dict(), {"lr_lambdas", "_scale_fn_custom"}
    code &= own.keys()
    # A callable object is saved with its attributes: another value was reported as a setting.
    if not code or any(own[key] != saved.get(key) for key in code):
        return None
    with suppress(Exception):  # if a function fails, the scheduler's next step raises the error
        if isinstance(scheduler, MultiplicativeLR):
            steps = range(1, saved["last_epoch"] + 1)
            both = zip(saved["base_lrs"], scheduler.lr_lambdas, strict=alone)
            now = [rate * math.prod(map(function, steps)) for rate, function in both if alone]
        else:
            trial = copy.copy(scheduler)
            vars(trial).update({key: value for key, value in saved.items() if key not in code})
            # Without a warning of PyTorch, and without a change of the optimizer's momentum.
            vars(trial).update(_get_lr_called_within_step=True, cycle_momentum=False)
            now = list(trial.get_lr())
        rates = [(float(one), float(two)) for one, two in zip(now, saved["_last_lr"], strict=alone)]
        # Part of a sequence may not have begun.
        begun = saved["last_epoch"] >= 0
        if begun and any(not math.isclose(*each, rel_tol=1e-6, abs_tol=1e-12) for each in rates):
            one, two = (
                [f"{rate:.6g}" for rate in dict.fromkeys(each)] for each in zip(*rates, strict=True)
            )
            return ", ".join(one), ", ".join(two)
    return None


def _is_alike(came: object, here: object) -> bool:
    """Whether a saved setting can replace the script's."""
    if here is None:
        return True
    if isinstance(here, tuple):
        if not isinstance(came, tuple | list) or len(came) != len(here):
            return False
        return all(_is_alike(one, other) for one, other in zip(came, here, strict=True))
    # Python numbers and one-element tensors are interchangeable.
    if _is_number(here):
        return _is_number(came)
    return isinstance(came, type(here))


def _is_number(value: object) -> bool:
    of_one = isinstance(value, torch.Tensor | np.ndarray) and math.prod(value.shape) == 1
    return of_one or (isinstance(value, int | float) and not isinstance(value, bool))


def _is_finite(value: object) -> bool:
    if isinstance(value, tuple | list):
        return all(map(_is_finite, value))
    return not _is_number(value) or math.isfinite(value)  # type: ignore[arg-type]


def _refusal(kind: type[torch.optim.Optimizer], settings: Mapping[str, Any]) -> str:
    """Return why an optimizer class rejects settings, by constructing it with a dummy parameter."""
    try:
        taken = inspect.signature(kind).parameters.keys() - {"params"}
        with torch.random.fork_rng(devices=[]):
            parameter = torch.nn.Parameter(torch.zeros(1, 1))
            kind([parameter], **{k: v for k, v in settings.items() if k in taken})
    except Exception as error:
        return f"which {kind.__name__} rejects ({message_of(error)})"
    return ""


def _grouped(names: list[list[str]]) -> dict[str, int]:
    """Return the group number of each parameter, by name."""
    return {name: number for number, group in enumerate(names) for name in group}
