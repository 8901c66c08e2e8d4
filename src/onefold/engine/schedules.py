"""The schedules of several optimizers, as one."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torch.optim.lr_scheduler import LRScheduler

from onefold.engine.optimizers import Optimizers

__all__ = ["Schedules", "class_of", "schedules_in"]


class Schedules(LRScheduler):
    """Schedules of several optimizers, which are saved together and stepped one by one.

    Args:
        given: the user's own, by the name of the optimizer, already checked.
        optimizer: the optimizers.
    """

    # The base class would wrap the optimizer's step, and step once.
    def __init__(self, given: Mapping[str, LRScheduler], optimizer: Optimizers) -> None:
        self.given = dict(given)
        """The user's own, by name."""
        self.optimizer: Optimizers = optimizer

    @property
    def last_epoch(self) -> list[object]:  # type: ignore[override]
        """What each of them counts."""
        return [getattr(each, "last_epoch", None) for each in self.given.values()]

    def step(self, epoch: int | None = None) -> None:
        """Step all of them, as at the end of an epoch."""
        for each in self.given.values():
            each.step()

    def step_of(self, name: str) -> None:
        """Step those of the optimizers that a loss of this name has updated."""
        for each in self.optimizer.of_loss(name):
            if each in self.given:
                self.given[each].step()

    def state_dict(self) -> dict[str, Any]:
        """The state of each, by name."""
        return {name: each.state_dict() for name, each in self.given.items()}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Adopt what `state_dict` returned."""
        for name, each in self.given.items():
            each.load_state_dict(state_dict[name])


def schedules_in(schedule: LRScheduler) -> dict[str, LRScheduler]:
    """The user's own schedules, by name; one alone has an empty name."""
    return schedule.given if isinstance(schedule, Schedules) else {"": schedule}


def class_of(schedule: LRScheduler) -> str:
    """The class of a schedule; of several, the class and name of each."""
    found = schedules_in(schedule).items()
    return ", ".join(type(each).__name__ + (f" ({name})" if name else "") for name, each in found)
