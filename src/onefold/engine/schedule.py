"""Checks and saves the learning-rate schedule of a run, which is stepped once in every step."""

from __future__ import annotations

from typing import Any

import torch
from torch.optim.lr_scheduler import LRScheduler, ReduceLROnPlateau

from onefold.core.jsonvalue import from_json, to_json
from onefold.errors import CheckpointError

__all__ = ["check_schedule", "check_state", "read_schedule", "write_schedule"]


def check_schedule(schedule: object, optimizer: torch.optim.Optimizer) -> None:
    """Refuse a schedule that cannot be stepped or saved, before any work.

    Raises:
        TypeError: the argument is not a scheduler, needs a score, or has state that cannot be
            saved.
        ValueError: the schedule belongs to another optimizer.
    """
    if not isinstance(schedule, LRScheduler):
        raise TypeError(
            f"expected schedule to be a torch.optim.lr_scheduler, got {type(schedule).__name__}"
        )
    name = type(schedule).__name__
    if isinstance(schedule, ReduceLROnPlateau):
        raise TypeError(
            f"{name} needs a score at each of its steps, so Trainer cannot step it: call "
            f"schedule.step(score) yourself, and save its state_dict with save(..., extra=...)"
        )
    if schedule.optimizer is not optimizer:
        raise ValueError(
            f"{name} was made for another optimizer than the one that Trainer was given"
        )
    # Thrown away: it is to fail now rather than at the first checkpoint, hours into a run.
    write_schedule(schedule)


def write_schedule(schedule: LRScheduler) -> dict[str, Any]:
    """Return a schedule's class and state as JSON."""
    name = type(schedule).__name__
    return {"class": name, "state": to_json(schedule.state_dict(), f"the state of {name}")}


def check_state(schedule: LRScheduler, saved: dict[str, Any]) -> None:
    """Refuse a saved state that would replace the schedule's methods or its optimizer.

    Raises:
        CheckpointError: the state has a key of that kind.
    """
    # load_state_dict is a plain update of __dict__: a file could put anything in a method's place.
    kind = type(schedule)
    state = from_json(saved["state"])
    ours = [key for key in state if key == "optimizer" or callable(getattr(kind, key, None))]
    if ours:
        raise CheckpointError(
            f"the saved state of {kind.__name__} has {', '.join(ours)}, which is no state"
        )


def read_schedule(schedule: LRScheduler, saved: dict[str, Any]) -> None:
    """Bring a schedule to the state that `write_schedule` saved.

    Raises:
        CheckpointError: the state does not fit the schedule.
    """
    try:
        schedule.load_state_dict(from_json(saved["state"]))
    except (AttributeError, LookupError, TypeError, ValueError) as error:
        name = type(schedule).__name__
        raise CheckpointError(f"the saved state of {name} cannot be used: {error!r}") from error
