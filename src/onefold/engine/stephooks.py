"""Hooks on the user's optimizers: what a script calls by mistake is refused."""

from __future__ import annotations

from collections.abc import Callable, Collection
from typing import Any

import torch

from onefold.errors import StateError
from onefold.system.compat import count_hooks

__all__ = ["explain_state_dict", "refuse_hooks", "refuse_own_steps"]

_OURS = 1
"""How many hooks on ``step`` each optimizer has from `refuse_own_steps`."""

Optimizers = Collection[torch.optim.Optimizer]


def explain_state_dict(optimizers: Optimizers) -> None:
    """Have the optimizers' own state_dict() raise, rather than return a part of the state."""

    def refuse(*_: Any) -> None:
        raise RuntimeError(
            "the optimizer's state is divided among the devices of the run, so its own "
            "state_dict() and load_state_dict() would see a part of it. Load it before "
            "Trainer is made"
        )

    for optimizer in optimizers:
        optimizer.register_state_dict_pre_hook(refuse)
        optimizer.register_load_state_dict_pre_hook(refuse)


def refuse_own_steps(optimizers: Optimizers, is_ours: Callable[[], bool]) -> None:
    """Refuse the script's own ``optimizer.step()``, which would silently update nothing.

    Args:
        optimizers: the user's own.
        is_ours: whether it is the trainer that calls.
    """

    def refuse(optimizer: torch.optim.Optimizer, *_: Any) -> None:
        if not is_ours():
            raise RuntimeError(
                f"{type(optimizer).__name__}.step() was called by the script: trainer.step() "
                f"has made the update already, and there are no gradients left. Remove the "
                f"line (and loss.backward(), clip_grad_norm_ and zero_grad with it)"
            )

    for optimizer in optimizers:
        optimizer.register_step_pre_hook(refuse)


def refuse_hooks(optimizers: Optimizers) -> None:
    """Refuse hooks of the script's, which expect to be called once a step.

    Raises:
        StateError: an optimizer has hooks on its step besides ours.
    """
    for optimizer in optimizers:
        if count_hooks(optimizer) > _OURS:
            raise StateError(
                f"{type(optimizer).__name__} has hooks on step(), which keep=host would call once "
                f"for each stage of the model: expected none. Call what they do after "
                f"trainer.step, or use --keep span"
            )
