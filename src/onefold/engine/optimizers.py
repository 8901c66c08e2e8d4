"""Several optimizers, each for parameters of its own, as one."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Mapping
from itertools import chain
from typing import Any

import torch

from onefold.system.compat import steps_a_schedule

__all__ = ["Optimizers", "name_of", "optimizers_in", "scheduled"]


class Optimizers(torch.optim.Optimizer):
    """Several optimizers, of which one makes each update, or all together.

    Their groups stand side by side: they are the very groups of the optimizers, so whoever changes
    a setting there changes it here. Their state lies in one place, as no two have a parameter in
    common.

    Args:
        given: the user's own, by name, already checked.
        together: whether all of them make each update, as there is one loss for them; otherwise
            the one with the name of the loss does.
    """

    # The base class would make groups and state of its own.
    def __init__(self, given: Mapping[str, torch.optim.Optimizer], *, together: bool) -> None:
        self.given = dict(given)
        """The user's own, by name."""
        self._together = together
        self.active = self.of_loss(next(iter(self.given)))
        """The names of those that make the next update."""
        self.defaults: dict[str, Any] = {}
        self.state: defaultdict[Any, Any] = defaultdict(dict)
        for each in self.given.values():
            self.state.update(each.state)
            each.state = self.state

    @property
    def param_groups(self) -> list[dict[str, Any]]:  # type: ignore[override]
        """The groups of all optimizers, in the order in which these were given."""
        return list(chain.from_iterable(each.param_groups for each in self.given.values()))

    def of_loss(self, name: str) -> list[str]:
        """The names of the optimizers that update in a step of a loss."""
        return list(self.given) if self._together else [name]

    def step(self, closure: Callable[[], float] | None = None) -> None:  # type: ignore[override]
        """Have the active optimizers make their updates, in the order in which they were given."""
        for name in self.active:
            self.given[name].step(closure)


def optimizers_in(optimizer: torch.optim.Optimizer) -> dict[str, torch.optim.Optimizer]:
    """The user's own optimizers, by name; one alone has an empty name."""
    return optimizer.given if isinstance(optimizer, Optimizers) else {"": optimizer}


def name_of(optimizer: torch.optim.Optimizer) -> str:
    """The class of an optimizer; of several, the class and name of each."""
    found = optimizers_in(optimizer).items()
    return ", ".join(type(each).__name__ + (f" ({name})" if name else "") for name, each in found)


def scheduled(optimizer: torch.optim.Optimizer) -> list[str]:
    """The names of the optimizers to which a learning-rate schedule is attached."""
    return [name for name, each in optimizers_in(optimizer).items() if steps_a_schedule(each.step)]
