"""The losses that steps can be made of."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

import torch

from onefold.core.late import load
from onefold.core.settings import Settings
from onefold.shard.task import LossFunction
from onefold.update.optimizers import Optimizers

__all__ = ["Objective", "objectives_of"]


@dataclass(slots=True, kw_only=True)
class Objective:
    """A loss that steps can be made of."""

    name: str
    """What the script calls it; empty where it is the only one."""
    number: int
    """Its place among all losses of the run."""
    run: LossFunction
    """The user's loss as steps compute it."""
    left_out: tuple[int, ...]
    """Numbers of the trained parameters that its optimizer does not update."""
    several_terms: bool = False
    """Whether it has returned a sum of several terms."""
    gathers: bool = False
    """Whether it has called `onefold.gather`."""
    trained: Sequence[bool] | None = None
    """Whether each parameter required a gradient as its last step began; None before that."""


def objectives_of(
    losses: Mapping[str, LossFunction],
    optimizer: torch.optim.Optimizer,
    trained: Iterable[torch.nn.Parameter],
    settings: Settings,
) -> dict[str, Objective]:
    """Put losses and optimizers together.

    Args:
        losses: the user's loss functions, by name.
        optimizer: the run's; several have the names of the losses, or there is one.
        trained: the parameters that any optimizer updates.
        settings: the settings of the run.
    """
    made = {}
    if settings.compile:
        compiled = load("shard.compiling").compiled
        losses = {name: compiled(loss, settings) for name, loss in losses.items()}
    for number, (name, loss) in enumerate(losses.items()):
        left_out: tuple[int, ...] = ()
        if isinstance(optimizer, Optimizers):
            used = [optimizer.given[each].param_groups for each in optimizer.of_loss(name)]
            held = {id(p) for groups in used for group in groups for p in group["params"]}
            left_out = tuple(n for n, p in enumerate(trained) if id(p) not in held)
        made[name] = Objective(name=name, number=number, run=loss, left_out=left_out)
    return made
