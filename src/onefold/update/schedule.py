"""The learning-rate schedule of a run: when it is stepped, checked, saved and gone on with.

Note: the schedule and the epoch of a checkpoint
------------------------------------------------
With ``schedule_every="epoch"``, the rate of epoch k is the one after k steps of the schedule, as in
a plain loop that ends with ``schedule.step()``. A checkpoint may be made anywhere, and counts its
epoch as done or not (see `onefold.data_order.position`); the schedule is stepped where the epoch
ends. So beside the schedule's state a checkpoint holds which epoch is *open*: the one that has had
steps, and at whose end the schedule is still to be stepped::

                 a step in epoch k             epoch k ends: schedule.step()
    none open ───────────────────────▶ k open ──────────────────────────────▶ none open
                                         │
                                         │ saved                         loaded
                                         ├─ within a pass, or after      k open: the end of epoch
                                         │  its last step: "epoch k"     k steps it, even if nothing
                                         │                               of its pass is left
                                         └─ after the pass, before the   stepped at once, none open
                                            epoch's end: "epoch k + 1"

An epoch without a step opens nothing, and so does not count: a script that skips epochs does not
step its schedule in them either. Neither do those that a resumed run has behind it.
"""

from __future__ import annotations

import warnings
from collections.abc import Collection, Mapping
from typing import Any

import torch
from torch.optim.lr_scheduler import ChainedScheduler, LRScheduler, ReduceLROnPlateau

from onefold.core.jsonvalue import from_json, to_json
from onefold.core.settings import ScheduleEvery
from onefold.errors import CheckpointError
from onefold.system.words import message_of
from onefold.update.optimizers import Schedules, class_of, optimizers_in, scheduled, schedules_in

__all__ = ["RunSchedule", "check_schedule"]


class RunSchedule:
    """The schedule of a run, and when it is stepped.

    Args:
        schedule: the user's, already checked; None if the run has none.
        every: after each step, at the end of each epoch, or when the script does it.
        optimizer: the optimizer of the run.
    """

    def __init__(
        self, schedule: LRScheduler | None, every: ScheduleEvery, optimizer: torch.optim.Optimizer
    ) -> None:
        self.schedule = schedule
        self.at_start = {} if schedule is None else _settings_of(schedule)
        """The settings that the script gave it, as JSON, by how a script would write them."""
        self._optimizer = optimizer
        self._every = every
        self._open: int | None = None
        """The epoch in which steps were made and at whose end the schedule is to be stepped."""
        self._count: object = None
        """The schedule's own count of its steps, as we left it; None before the first step."""

    @property
    def is_missing(self) -> bool:
        """Whether the script steps a schedule that the trainer was not given, so none is saved."""
        saved = {} if self.schedule is None else schedules_in(self.schedule)
        return any(name not in saved for name in scheduled(self._optimizer))

    def followed(self) -> list[bool]:
        """For each of the optimizer's groups, whether a schedule sets its learning rate."""
        names = schedules_in(self.schedule) if self.schedule is not None else {}
        each = optimizers_in(self._optimizer).items()
        return [name in names for name, optimizer in each for _ in optimizer.param_groups]

    @property
    def is_the_scripts(self) -> bool:
        """Whether the script steps it, which may happen between any two steps."""
        return self.schedule is not None and self._every == "script"

    def check_step(self, epoch: int | None) -> None:
        """Refuse a step in which the learning rate would not be the one that was meant.

        Args:
            epoch: the epoch that the step is in; None outside of any.

        Raises:
            ValueError: the schedule is stepped at the end of epochs, and the step is in none.
            RuntimeError: the script has stepped the schedule, which the trainer does.
        """
        if self.schedule is None or self._every == "script":
            return
        if self._every == "epoch" and epoch is None:
            raise ValueError(
                'schedule_every="epoch" steps the schedule where an epoch of trainer.epochs ends, '
                "and this step is in none: loop with `for epoch in trainer.epochs(...)`, or use "
                'schedule_every="script" and call schedule.step() where it is due'
            )
        count = self._own_count
        if self._count is None:
            self._count = count
        elif count != self._count:
            raise RuntimeError(
                f"{class_of(self.schedule)}.step() was called by the script, and the trainer "
                f'steps this schedule as well: schedule_every="{self._every}". Remove the line, or '
                f'use schedule_every="script", with which the script alone steps it'
            )

    def note_step(self, epoch: int | None, name: str, *, updates: bool) -> None:
        """Note that a step is done, and step the schedule if that is due after each.

        Args:
            epoch: the epoch that the step was in; None outside of any.
            name: of the loss, if there are several.
            updates: whether it has updated the parameters.
        """
        if self.schedule is None:
            return
        if self._every == "epoch":
            self._open = epoch
        elif self._every == "step" and updates:
            if isinstance(self.schedule, Schedules):
                self.schedule.step_of(name)
            else:
                self.schedule.step()
            self._count = self._own_count

    def end_epoch(self) -> None:
        """Step the schedule if an epoch has ended that had steps."""
        if self.schedule is None or self._open is None:
            return
        untouched = self._own_count == self._count
        _step_quietly(self.schedule)
        self._open = None
        # A step of the script's own is left for `check_step` to find: raised here, in the last
        # epoch, it would cost a run that is done.
        if untouched:
            self._count = self._own_count

    def to_json(self) -> dict[str, Any] | None:
        """Write down the schedule's state and what it waits for; None if there is no schedule."""
        if self.schedule is None:
            return None
        written = write_schedule(self.schedule)
        waits = {"every": self._every, "open": self._open}
        return {**written, "settings_at_start": self.at_start, **waits}

    def check_fits(self, saved: Mapping[str, Any]) -> None:
        """Refuse a saved schedule that must not be loaded into this one.

        Raises:
            CheckpointError: it would replace methods of the schedule, or its optimizer.
        """
        if self.schedule is None:
            return
        # load_state_dict is a plain update of __dict__: a file could put anything in the place of
        # a method, or of the optimizer.
        state = from_json(saved["state"])
        several = isinstance(self.schedule, Schedules)
        for name, each in schedules_in(self.schedule).items():
            kind, own = type(each), state.get(name) if several else state
            if not isinstance(own, dict):
                raise CheckpointError(
                    f"the saved schedules have no state of {kind.__name__} ({name})"
                )
            ours = [key for key in own if key == "optimizer" or callable(getattr(kind, key, None))]
            if ours:
                raise CheckpointError(
                    f"the saved state of {kind.__name__} has {', '.join(ours)}, which is no state"
                )

    def go_on(self, run: Mapping[str, Any], allow_changed: Collection[str]) -> None:
        """Continue as the saved run would have.

        Args:
            run: the content of ``run.json``.
            allow_changed: what may differ from it; with ``"schedule"`` this one begins anew.

        Raises:
            CheckpointError: the saved state does not fit the schedule.
        """
        if self.schedule is None:
            return
        self._open = None
        if "schedule" not in allow_changed:
            name = class_of(self.schedule)
            try:
                self.schedule.load_state_dict(from_json(run["schedule"]["state"]))
            except (AttributeError, LookupError, TypeError, ValueError) as error:
                why = f"{type(error).__name__}: {message_of(error)}"
                raise CheckpointError(f"the saved state of {name} cannot be used: {why}") from error
            self._open = run["schedule"].get("open")
        # Saved in the epoch that is open, but where that counted as done.
        if self._open is not None and self._open < run["epoch"]:
            _step_quietly(self.schedule)
            self._open = None
        self._count = self._own_count

    @property
    def _own_count(self) -> object:
        if isinstance(self.schedule, ChainedScheduler):  # which has no count itself
            parts = self.schedule.state_dict()["_schedulers"]
            return [part.get("last_epoch") for part in parts]
        return getattr(self.schedule, "last_epoch", None)


def _step_quietly(schedule: LRScheduler) -> None:
    """Step a schedule although this process may not have updated anything yet."""
    # A resumed run, or one whose steps were all skipped, is no script with its lines in the wrong
    # order, which is what PyTorch warns of.
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "Detected call of `lr_scheduler.step")
        schedule.step()


def check_schedule(
    schedule: object, optimizer: torch.optim.Optimizer, every: ScheduleEvery = "step"
) -> None:
    """Refuse a schedule that cannot be stepped or saved, before any work.

    Args:
        schedule: what the script gave; None for no schedule.
        optimizer: the optimizer of the run.
        every: when the schedule is to be stepped.

    Raises:
        TypeError: the argument is not a scheduler, needs a score, or has state that cannot be
            saved.
        ValueError: the schedule belongs to another optimizer, or there is none to step.
    """
    if schedule is None:
        if every != "step":
            raise ValueError(
                f'schedule_every="{every}" says when the schedule is stepped, and there is none: '
                f"give it to Trainer as schedule=, or leave schedule_every out"
            )
        return
    if not isinstance(schedule, LRScheduler):
        raise TypeError(
            f"expected schedule to be a torch.optim.lr_scheduler, got {type(schedule).__name__}"
        )
    optimizers = optimizers_in(optimizer)
    for name, each in schedules_in(schedule).items():
        _check_one(each, optimizers.get(name), every)
    # Thrown away: it is to fail now rather than at the first checkpoint, hours into a run.
    write_schedule(schedule)


def _check_one(
    schedule: LRScheduler, optimizer: torch.optim.Optimizer | None, every: ScheduleEvery
) -> None:
    name = type(schedule).__name__
    if isinstance(schedule, ReduceLROnPlateau) and every != "script":
        raise TypeError(
            f'{name} needs a score at each of its steps, which schedule_every="{every}" does not '
            f'have: use schedule_every="script", and call schedule.step(score) in the script, '
            f"alike on every device"
        )
    if schedule.optimizer is not optimizer:
        raise ValueError(
            f"{name} was made for another optimizer than the one that Trainer was given. For "
            f"several optimizers give a dict of schedules, under the same names, or a list beside "
            f"a list"
        )


def _settings_of(schedule: LRScheduler) -> dict[str, Any]:
    """What a schedule's state holds, and that of schedules inside of it.

    Rates are left out: they follow from those of the optimizer.
    """
    found = {}
    states = [
        (f"schedule[{name!r}]" if name else "schedule", each.state_dict())
        for name, each in schedules_in(schedule).items()
    ]
    for place, state in states:  # which grows
        parts = state.get("_schedulers", ())
        states += [(f"{place}._schedulers[{number}]", part) for number, part in enumerate(parts)]
        for key, value in state.items():
            if key not in ("_schedulers", "base_lrs", "_last_lr"):
                found[f"{place}.{key}"] = to_json(value, key)
    return found


def write_schedule(schedule: LRScheduler) -> dict[str, Any]:
    """Return a schedule's class and state as JSON."""
    name = class_of(schedule)
    return {"class": name, "state": to_json(schedule.state_dict(), f"the state of {name}")}
