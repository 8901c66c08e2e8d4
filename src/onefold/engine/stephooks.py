"""Hooks on the user's optimizers: ours refuse what a script calls by mistake; its own are seen."""

from __future__ import annotations

from collections.abc import Callable, Collection
from typing import Any

import torch

from onefold.system.compat import replaces_step
from onefold.system.hooks import step_hooks

__all__ = ["explain_state_dict", "has_own_step", "refuse_own_steps", "steps_by_parameter"]

_NOT_A_SCRIPTS = ("onefold.", "torch.")
"""Where hooks are from that only look, ours and those of PyTorch's profiler."""

Optimizers = Collection[torch.optim.Optimizer]


def explain_state_dict(optimizers: Optimizers, is_whole: Callable[[], bool]) -> None:
    """Have the optimizers' own state_dict() raise, rather than return a part of the state.

    Args:
        optimizers: the user's own.
        is_whole: whether the state of whole parameters is there.
    """

    def refuse(*_: Any) -> None:
        if not is_whole():
            raise RuntimeError(
                "the optimizer's state is divided among the devices of the run, so its own "
                "state_dict() and load_state_dict() would see a part of it. Load it before "
                "Trainer is made, or in `with trainer.changing(optimizer_state=True):`"
            )

    for optimizer in optimizers:
        optimizer.register_state_dict_pre_hook(refuse)
        optimizer.register_load_state_dict_pre_hook(refuse)


def refuse_own_steps(optimizers: Optimizers, is_ours: Callable[[], bool | None]) -> None:
    """Refuse the script's own ``optimizer.step()``, which would silently update nothing.

    Args:
        optimizers: the user's own.
        is_ours: whether it is the trainer that calls; None if the trainer is no more.
    """

    def refuse(optimizer: torch.optim.Optimizer, *_: Any) -> None:
        ours = is_ours()
        if ours is None:
            raise RuntimeError(
                f"{type(optimizer).__name__}.step() was called by the script, after a Trainer had "
                f"it, which divided its state among the devices and has let it go: make another "
                f"optimizer for what follows"
            )
        if not ours:
            raise RuntimeError(
                f"{type(optimizer).__name__}.step() was called by the script: trainer.step() "
                f"has made the update already, and there are no gradients left. Remove the "
                f"line (and loss.backward(), clip_grad_norm_ and zero_grad with it)"
            )

    for optimizer in optimizers:
        optimizer.register_step_pre_hook(refuse)


def has_own_step(optimizer: torch.optim.Optimizer) -> bool:
    """Whether a script has put code around an optimizer's ``step()``: a hook, or a wrapper."""
    froms = [getattr(hook, "__module__", None) or "" for hook in step_hooks(optimizer)]
    own = any(not each.startswith(_NOT_A_SCRIPTS) for each in froms)
    return own or replaces_step(optimizer)


def steps_by_parameter(optimizers: Optimizers) -> bool:
    """Whether what ``step()`` does to a parameter follows from that, its gradient and its state.

    It does in PyTorch's own optimizers, which also count for each parameter. Others may count their
    calls, draw, or look at all parameters together; hooks of a script may do anything.
    """
    return all(
        type(each).__module__.startswith("torch.optim.") and not has_own_step(each)
        for each in optimizers
    )
