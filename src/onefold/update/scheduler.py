"""The learning rate scheduler of a run: when it is stepped, checked, saved and gone on with.

Note: the scheduler and the epoch of a checkpoint
------------------------------------------------
With ``scheduler_every="epoch"``, the rate of epoch k is the one after k steps of the scheduler, as
in a plain loop that ends with ``scheduler.step()``. A checkpoint may be made anywhere, and counts
its epoch as done or not (see `onefold.data_order.position`); the scheduler is stepped where the
epoch ends. So beside the scheduler's state a checkpoint holds which epoch is *open*: the one that
has had steps, and at whose end the scheduler is still to be stepped::

                 a step in epoch k             epoch k ends: scheduler.step()
    none open ───────────────────────▶ k open ──────────────────────────────▶ none open
                                         │
                                         │ saved                         loaded
                                         ├─ within a pass, or after      k open: the end of epoch
                                         │  its last step: "epoch k"     k steps it, even if nothing
                                         │                               of its pass is left
                                         └─ after the pass, before the   stepped at once, none open
                                            epoch's end: "epoch k + 1"

An epoch without a step opens nothing, and so does not count: a script that skips epochs does not
step its scheduler in them either. Neither do those that a resumed run has behind it.
"""

from __future__ import annotations

import copy
import warnings
from collections.abc import Collection, Mapping
from contextlib import suppress
from typing import Any

import torch
from torch.optim.lr_scheduler import ChainedScheduler, LRScheduler, ReduceLROnPlateau

from onefold.core.encoding import from_json, to_json
from onefold.core.settings import SchedulerEvery
from onefold.errors import CheckpointError
from onefold.system.words import message_of
from onefold.update.optimizers import (
    Schedulers,
    class_of,
    optimizers_in,
    scheduled,
    schedulers_in,
    settings_of,
)

__all__ = ["RunScheduler", "check_scheduler"]


class RunScheduler:
    """The scheduler of a run, and when it is stepped.

    Args:
        scheduler: the user's, already checked; None if the run has none.
        every: after each step, at the end of each epoch, or when the script does it.
        optimizer: the optimizer of the run.
    """

    def __init__(
        self, scheduler: LRScheduler | None, every: SchedulerEvery, optimizer: torch.optim.Optimizer
    ) -> None:
        self.scheduler = scheduler
        self.at_start = {} if scheduler is None else _settings_of(scheduler)
        """The settings that the script gave it, as JSON, by how a script would write them."""
        self.optimizer_at_start: list[dict[str, Any]] = []
        """The settings that the script gave to the optimizer's groups, as JSON; none if they cannot
        be saved."""
        with suppress(TypeError):  # only a save refuses them
            self.optimizer_at_start = settings_of(optimizer)
        self._optimizer = optimizer
        self._every = every
        self._open: int | None = None
        """The epoch in which steps were made and at whose end the scheduler is to be stepped."""
        self._count: object = None
        """The scheduler's own count of its steps, as we left it; None before the first step."""

    @property
    def is_missing(self) -> bool:
        """Whether the script steps a scheduler that the trainer was not given, so none is saved."""
        saved = {} if self.scheduler is None else schedulers_in(self.scheduler)
        return any(name not in saved for name in scheduled(self._optimizer))

    def followed(self) -> list[bool]:
        """For each of the optimizer's groups, whether a scheduler sets its learning rate."""
        names = schedulers_in(self.scheduler) if self.scheduler is not None else {}
        each = optimizers_in(self._optimizer).items()
        return [name in names for name, optimizer in each for _ in optimizer.param_groups]

    @property
    def is_the_scripts(self) -> bool:
        """Whether the script steps it, which may happen between any two steps."""
        return self.scheduler is not None and self._every == "script"

    def check_step(self, epoch: int | None) -> None:
        """Refuse a step in which the learning rate would not be the one that was meant.

        Args:
            epoch: the epoch that the step is in; None outside of any.

        Raises:
            ValueError: the scheduler is stepped at the end of epochs, and the step is in none.
            RuntimeError: the script has stepped the scheduler, which the trainer does.
        """
        if self.scheduler is None or self._every == "script":
            return
        if self._every == "epoch" and epoch is None:
            raise ValueError(
                'scheduler_every="epoch" steps the scheduler where an epoch of trainer.epochs '
                "ends, and this step is in none: loop with `for epoch in trainer.epochs(...)`, or "
                'use scheduler_every="script" and call scheduler.step() where it is due'
            )
        count = self._own_count
        if self._count is None:
            self._count = count
        elif count != self._count:
            raise RuntimeError(
                f"{class_of(self.scheduler)}.step() was called by the script, and the trainer "
                f'steps this scheduler as well: scheduler_every="{self._every}". Remove the line, '
                f'or use scheduler_every="script", with which the script alone steps it'
            )

    def note_step(self, epoch: int | None, name: str, *, updates: bool) -> None:
        """Note that a step is done, and step the scheduler if that is due after each.

        Args:
            epoch: the epoch that the step was in; None outside of any.
            name: of the loss, if there are several.
            updates: whether it has updated the parameters.
        """
        if self.scheduler is None:
            return
        if self._every == "epoch":
            self._open = epoch
        elif self._every == "step" and updates:
            if isinstance(self.scheduler, Schedulers):
                self.scheduler.step_of(name)
            else:
                self.scheduler.step()
            self._count = self._own_count

    def end_epoch(self) -> None:
        """Step the scheduler if an epoch has ended that had steps."""
        if self.scheduler is None or self._open is None:
            return
        untouched = self._own_count == self._count
        _step_quietly(self.scheduler)
        self._open = None
        # A step of the script's own is left for `check_step` to find: raised here, in the last
        # epoch, it would cost a run that is done.
        if untouched:
            self._count = self._own_count

    def to_json(self) -> dict[str, Any] | None:
        """Write down the scheduler's state and what it waits for; None if there is no scheduler."""
        if self.scheduler is None:
            return None
        written = write_scheduler(self.scheduler)
        waits = {"every": self._every, "open": self._open}
        return {**written, "settings_at_start": self.at_start, **waits}

    def check_fits(self, saved: Mapping[str, Any]) -> None:
        """Refuse a saved scheduler that must not be loaded into this one.

        Raises:
            CheckpointError: it would replace methods of the scheduler, or its optimizer.
        """
        if self.scheduler is None:
            return
        # load_state_dict is a plain update of __dict__: a file could put anything in the place of
        # a method, or of the optimizer.
        state = from_json(saved["state"])
        several = isinstance(self.scheduler, Schedulers)
        for name, each in schedulers_in(self.scheduler).items():
            kind, own = type(each), state.get(name) if several else state
            if not isinstance(own, dict):
                raise CheckpointError(
                    f"the saved schedulers have no state of {kind.__name__} ({name})"
                )
            ours = [key for key in own if key == "optimizer" or callable(getattr(kind, key, None))]
            if ours:
                raise CheckpointError(
                    f"the saved state of {kind.__name__} has {', '.join(ours)}, which is no state"
                )
        # Tried here, as a failure later would leave a model that is half loaded.
        before = [(each, dict(vars(each))) for each in schedulers_in(self.scheduler).values()]
        old = copy.deepcopy(self.scheduler.state_dict())
        try:
            _load(self.scheduler, state)
        finally:
            for each, its in before:
                vars(each).clear()
                vars(each).update(its)
            self.scheduler.load_state_dict(old)

    def go_on(self, run: Mapping[str, Any], allow_changed: Collection[str]) -> None:
        """Continue as the saved run would have.

        Args:
            run: the content of ``run.json``.
            allow_changed: what may differ from it; with ``"scheduler"`` this one begins anew.

        Raises:
            CheckpointError: the saved state does not fit the scheduler.
        """
        if self.scheduler is None:
            return
        self._open = None
        if "scheduler" not in allow_changed:
            _load(self.scheduler, from_json(run["scheduler"]["state"]))
            self._open = run["scheduler"].get("open")
        # Saved in the epoch that is open, but where that counted as done.
        if self._open is not None and self._open < run["epoch"]:
            _step_quietly(self.scheduler)
            self._open = None
        self._count = self._own_count

    @property
    def _own_count(self) -> object:
        if isinstance(self.scheduler, ChainedScheduler):  # which has no count itself
            parts = self.scheduler.state_dict()["_schedulers"]
            return [part.get("last_epoch") for part in parts]
        return getattr(self.scheduler, "last_epoch", None)


def _step_quietly(scheduler: LRScheduler) -> None:
    """Step a scheduler although this process may not have updated anything yet."""
    # A resumed run, or one whose steps were all skipped, is no script with its lines in the wrong
    # order, which is what PyTorch warns of.
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "Detected call of `lr_scheduler.step")
        scheduler.step()


def check_scheduler(
    scheduler: object, optimizer: torch.optim.Optimizer, every: SchedulerEvery = "step"
) -> None:
    """Refuse a scheduler that cannot be stepped or saved, before any work.

    Args:
        scheduler: what the script gave; None for no scheduler.
        optimizer: the optimizer of the run.
        every: when the scheduler is to be stepped.

    Raises:
        TypeError: the argument is not a scheduler, needs a score, or has state that cannot be
            saved.
        ValueError: the scheduler belongs to another optimizer, or there is none to step.
    """
    if scheduler is None:
        if every != "step":
            raise ValueError(
                f'scheduler_every="{every}" says when the scheduler is stepped, and there is none: '
                f"give it to Trainer as scheduler=, or leave scheduler_every out"
            )
        return
    if not isinstance(scheduler, LRScheduler):
        raise TypeError(
            f"expected scheduler to be a torch.optim.lr_scheduler, got {type(scheduler).__name__}"
        )
    optimizers = optimizers_in(optimizer)
    for name, each in schedulers_in(scheduler).items():
        _check_one(each, optimizers.get(name), every)
    # Thrown away: it is to fail now rather than at the first checkpoint, hours into a run.
    write_scheduler(scheduler)


def _check_one(
    scheduler: LRScheduler, optimizer: torch.optim.Optimizer | None, every: SchedulerEvery
) -> None:
    name = type(scheduler).__name__
    if isinstance(scheduler, ReduceLROnPlateau) and every != "script":
        raise TypeError(
            f'{name} needs a score at each of its steps, which scheduler_every="{every}" does not '
            f'have: use scheduler_every="script", and call scheduler.step(score) in the script, '
            f"alike on every device"
        )
    if scheduler.optimizer is not optimizer:
        raise ValueError(
            f"{name} was made for another optimizer than the one that Trainer was given. For "
            f"several optimizers give a dict of schedulers, under the same names, or a list beside "
            f"a list"
        )


def _settings_of(scheduler: LRScheduler) -> dict[str, Any]:
    """What a scheduler's state holds, and that of schedulers inside of it.

    Rates are left out: they follow from those of the optimizer.
    """
    found = {}
    states = [
        (f"scheduler[{name!r}]" if name else "scheduler", each.state_dict())
        for name, each in schedulers_in(scheduler).items()
    ]
    for place, state in states:  # which grows
        parts = state.get("_schedulers", ())
        states += [(f"{place}._schedulers[{number}]", part) for number, part in enumerate(parts)]
        for key, value in state.items():
            if key not in ("_schedulers", "base_lrs", "_last_lr"):
                found[f"{place}.{key}"] = to_json(value, key)
    return found


def write_scheduler(scheduler: LRScheduler) -> dict[str, Any]:
    """Return a scheduler's class and state as JSON."""
    name = class_of(scheduler)
    return {"class": name, "state": to_json(scheduler.state_dict(), f"the state of {name}")}


def _load(scheduler: LRScheduler, state: dict[str, Any]) -> None:
    try:
        scheduler.load_state_dict(state)
    except (AttributeError, LookupError, TypeError, ValueError) as error:
        name, why = class_of(scheduler), f"{type(error).__name__}: {message_of(error)}"
        raise CheckpointError(f"the saved state of {name} cannot be used: {why}") from error
