"""The learning rate scheduler of a run: when it is stepped, checked, saved and resumed.

Note: the scheduler and the epoch of a checkpoint
-------------------------------------------------
With ``scheduler_every="epoch"``, epoch k uses the learning rate after k steps of the scheduler, as
in a plain loop that ends with ``scheduler.step()``. A checkpoint may be made anywhere, and counts
its epoch as finished or not (see `onefold.data_order.position`); the scheduler is stepped where the
epoch ends. So a checkpoint stores, in addition to the scheduler's state, which epoch is *open*: the
epoch that has had steps, and whose end has yet to step the scheduler::

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
step its scheduler in them either. The same holds for epochs that a resumed run has already
completed.
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
        scheduler: the user's scheduler, already checked; None if the run has none.
        every: whether it is stepped after each step, at the end of each epoch, or by the script.
        optimizer: the optimizer of the run.
    """

    def __init__(
        self, scheduler: LRScheduler | None, every: SchedulerEvery, optimizer: torch.optim.Optimizer
    ) -> None:
        self.scheduler = scheduler
        self.at_start = {} if scheduler is None else _settings_of(scheduler)
        """Initial settings of the scheduler as JSON, by the expressions that a script would use."""
        self.optimizer_at_start: list[dict[str, Any]] = []
        """Initial settings of the optimizer's groups as JSON; empty if they cannot be saved."""
        # Only a save refuses settings that cannot be saved.
        with suppress(TypeError):
            self.optimizer_at_start = settings_of(optimizer)
        self._optimizer = optimizer
        self._every = every
        self._open: int | None = None
        """The epoch that had steps, and whose end has yet to step the scheduler."""
        self._count: object = None
        """The scheduler's own counter after the last call here; None before the first step."""

    @property
    def is_missing(self) -> bool:
        """Whether the script steps a scheduler that was not passed to Trainer, and is not saved."""
        saved = {} if self.scheduler is None else schedulers_in(self.scheduler)
        return any(name not in saved for name in scheduled(self._optimizer))

    def followed(self) -> list[bool]:
        """Whether a scheduler sets the learning rate, for each of the optimizer's groups."""
        names = schedulers_in(self.scheduler) if self.scheduler is not None else {}
        each = optimizers_in(self._optimizer).items()
        return [name in names for name, optimizer in each for _ in optimizer.param_groups]

    @property
    def is_the_scripts(self) -> bool:
        """Whether the script steps the scheduler, possibly between any two steps."""
        return self.scheduler is not None and self._every == "script"

    def check_step(self, epoch: int | None) -> None:
        """Refuse a step whose learning rate would be wrong.

        Args:
            epoch: the epoch of the step; None outside of epochs.

        Raises:
            ValueError: the scheduler is stepped at the end of epochs, but the step is in none.
            RuntimeError: the script stepped a scheduler that the trainer steps.
        """
        if self.scheduler is None or self._every == "script":
            return
        if self._every == "epoch" and epoch is None:
            raise ValueError(
                'scheduler_every="epoch" steps the scheduler at the end of each epoch of '
                "trainer.epochs, but this step is in none. Loop with `for epoch in "
                'trainer.epochs(...)`, or use scheduler_every="script" and call scheduler.step() '
                "where it is due"
            )
        count = self._own_count
        # The script may step the scheduler before the first step, so start from its counter here.
        if self._count is None:
            self._count = count
        elif count != self._count:
            raise RuntimeError(
                f"{class_of(self.scheduler)}.step() was called by the script, but the trainer "
                f'steps this scheduler too (scheduler_every="{self._every}"). Remove the line, or '
                f'use scheduler_every="script", with which only the script steps it'
            )

    def note_step(self, epoch: int | None, name: str, *, updates: bool) -> None:
        """Note a finished step, and step the scheduler if that is due after each step.

        Args:
            epoch: the epoch of the step; None outside of epochs.
            name: the name of the loss, if there are several.
            updates: whether the step updated the parameters.
        """
        if self.scheduler is None:
            return
        if self._every == "epoch":
            self._open = epoch
        # Skipped steps do not count: the learning rate follows the updates.
        elif self._every == "step" and updates:
            if isinstance(self.scheduler, Schedulers):
                self.scheduler.step_of(name)
            else:
                self.scheduler.step()
            self._count = self._own_count

    def end_epoch(self) -> None:
        """Step the scheduler if an epoch with steps has ended."""
        if self.scheduler is None or self._open is None:
            return
        untouched = self._own_count == self._count
        _step_quietly(self.scheduler)
        self._open = None
        # Leave a step by the script to `check_step`: an error here, in the last epoch, would cost a
        # run that has finished.
        if untouched:
            self._count = self._own_count

    def to_json(self) -> dict[str, Any] | None:
        """Return the scheduler's state and its pending epoch; None if there is no scheduler."""
        if self.scheduler is None:
            return None
        written = write_scheduler(self.scheduler)
        waits = {"every": self._every, "open": self._open}
        return {**written, "settings_at_start": self.at_start, **waits}

    def check_fits(self, saved: Mapping[str, Any]) -> None:
        """Refuse a saved scheduler that must not be loaded into this one.

        Raises:
            CheckpointError: it would replace the scheduler's methods or optimizer.
        """
        if self.scheduler is None:
            return
        # load_state_dict merely updates __dict__, so a file could replace a method, or the
        # optimizer.
        state = from_json(saved["state"])
        several = isinstance(self.scheduler, Schedulers)
        for name, each in schedulers_in(self.scheduler).items():
            kind, own = type(each), state.get(name) if several else state
            if not isinstance(own, dict):
                raise CheckpointError(
                    f"the saved schedulers contain no state of {kind.__name__} ({name})"
                )
            ours = [key for key in own if key == "optimizer" or callable(getattr(kind, key, None))]
            if ours:
                raise CheckpointError(
                    f"the saved state of {kind.__name__} contains {', '.join(ours)}, which is not "
                    f"state"
                )
        # Try it here, because a later failure would leave a model that is half loaded.
        before = [(each, dict(vars(each))) for each in schedulers_in(self.scheduler).values()]
        # A deep copy, because state_dict shares lists with the scheduler, which loading changes.
        old = copy.deepcopy(self.scheduler.state_dict())
        try:
            _load(self.scheduler, state)
        finally:
            # Restore attributes too: a failed load may have set some of them.
            for each, its in before:
                vars(each).clear()
                vars(each).update(its)
            self.scheduler.load_state_dict(old)

    def go_on(self, run: Mapping[str, Any], allow_changed: Collection[str]) -> None:
        """Continue as the saved run would have.

        Args:
            run: the content of ``run.json``.
            allow_changed: what may differ from it; with ``"scheduler"``, this one starts from
                scratch.

        Raises:
            CheckpointError: the saved state does not fit the scheduler.
        """
        if self.scheduler is None:
            return
        self._open = None
        if "scheduler" not in allow_changed:
            _load(self.scheduler, from_json(run["scheduler"]["state"]))
            self._open = run["scheduler"].get("open")
        # The checkpoint was saved in the open epoch, but counts it as finished.
        if self._open is not None and self._open < run["epoch"]:
            _step_quietly(self.scheduler)
            self._open = None
        self._count = self._own_count

    @property
    def _own_count(self) -> object:
        if isinstance(self.scheduler, ChainedScheduler):
            # It has no counter of its own.
            parts = self.scheduler.state_dict()["_schedulers"]
            return [part.get("last_epoch") for part in parts]
        return getattr(self.scheduler, "last_epoch", None)


def _step_quietly(scheduler: LRScheduler) -> None:
    """Step a scheduler although this process may not have made an update yet."""
    # PyTorch warns of scripts with their lines in the wrong order. A resumed run, or one that
    # skipped all steps, is not such a script.
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "Detected call of `lr_scheduler.step")
        scheduler.step()


def check_scheduler(
    scheduler: object, optimizer: torch.optim.Optimizer, every: SchedulerEvery = "step"
) -> None:
    """Refuse a scheduler that cannot be stepped or saved, before training.

    Args:
        scheduler: the script's argument; None for no scheduler.
        optimizer: the optimizer of the run.
        every: when the scheduler is stepped.

    Raises:
        TypeError: the argument is not a scheduler, needs a metric, or has state that cannot be
            saved.
        ValueError: the scheduler belongs to another optimizer, or there is none to step.
    """
    if scheduler is None:
        if every != "step":
            raise ValueError(
                f'scheduler_every="{every}" sets when the scheduler is stepped, but there is none. '
                f"Pass scheduler= to Trainer, or omit scheduler_every"
            )
        return
    if not isinstance(scheduler, LRScheduler):
        came = type(scheduler).__name__
        if isinstance(scheduler, type):
            came = f"the class {scheduler.__name__}. Pass {scheduler.__name__}(optimizer, ...)"
        raise TypeError(f"scheduler must be a torch.optim.lr_scheduler, but got {came}")
    optimizers = optimizers_in(optimizer)
    for name, each in schedulers_in(scheduler).items():
        _check_one(each, optimizers.get(name), every)
    # Discard the result: it must fail now instead of at the first checkpoint, hours into a run.
    write_scheduler(scheduler)


def _check_one(
    scheduler: LRScheduler, optimizer: torch.optim.Optimizer | None, every: SchedulerEvery
) -> None:
    name = type(scheduler).__name__
    if isinstance(scheduler, ReduceLROnPlateau) and every != "script":
        raise TypeError(
            f'{name} needs a metric at each of its steps, which scheduler_every="{every}" does not '
            f'have. Use scheduler_every="script", and call scheduler.step(metric) in the script, '
            f"on every device"
        )
    if scheduler.optimizer is not optimizer:
        raise ValueError(
            f"{name} belongs to another optimizer than the one passed to Trainer. For several "
            f"optimizers, pass a dict of schedulers with the same names, or a list for a list"
        )


def _settings_of(scheduler: LRScheduler) -> dict[str, Any]:
    """Return the state of a scheduler and of schedulers inside of it.

    Learning rates are omitted: they follow from the optimizer's.
    """
    found = {}
    states = [
        (f"scheduler[{name!r}]" if name else "scheduler", each.state_dict())
        for name, each in schedulers_in(scheduler).items()
    ]
    for place, state in states:
        # The list grows in the loop.
        parts = state.get("_schedulers", ())
        states += [(f"{place}._schedulers[{number}]", part) for number, part in enumerate(parts)]
        for key, value in state.items():
            # Rates follow from the optimizer's, which are compared themselves.
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
