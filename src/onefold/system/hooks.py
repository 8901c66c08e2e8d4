"""What PyTorch keeps to itself about hooks, and about calls that differentiate.

As for ``compat.py``, ``tests/system/test_compat.py`` says for each name what would break.
"""

from __future__ import annotations

import sys
from collections import OrderedDict
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
import torch.utils.checkpoint

__all__ = [
    "ProcessHooks",
    "has_backward_hooks",
    "hide_backward_hooks",
    "hooked",
    "step_hooks",
    "watch_differentiation",
]

_AUTOGRAD: Any = torch.autograd
_CHECKPOINT: Any = torch.utils.checkpoint
_OPTIMIZER: Any = sys.modules["torch.optim.optimizer"]  # torch.optim does not show it


_OF_ALL_MODULES: list[dict[int, Any]] = [
    table
    for name, table in vars(torch.nn.modules.module).items()
    if name.startswith("_global_") and isinstance(table, dict)
]


class ProcessHooks:
    """The hooks on all modules, and what looks at backward passes, as they are now.

    Also whether a layer that is checkpointed is computed again only as far as it is needed.
    """

    def __init__(self) -> None:
        self._of_modules = [table.copy() for table in _OF_ALL_MODULES]
        self._backward = _AUTOGRAD._engine_run_backward
        self._stops_early = _CHECKPOINT._enable_checkpoint_early_stop

    def put_back(self) -> None:
        """Make them these again."""
        for table, kept in zip(_OF_ALL_MODULES, self._of_modules, strict=True):
            table.clear()
            table.update(kept)
        _AUTOGRAD._engine_run_backward = self._backward
        _CHECKPOINT._enable_checkpoint_early_stop = self._stops_early


def step_hooks(optimizer: torch.optim.Optimizer) -> list[Callable[..., Any]]:
    """The hooks on an optimizer's step, those on the steps of all optimizers among them."""
    of_all = _OPTIMIZER._global_optimizer_pre_hooks, _OPTIMIZER._global_optimizer_post_hooks
    own = optimizer._optimizer_step_pre_hooks, optimizer._optimizer_step_post_hooks
    return [hook for hooks in (*of_all, *own) for hook in hooks.values()]


def hooked(parameters: Iterable[torch.Tensor]) -> list[int]:
    """The places of the parameters that have a hook on their accumulated gradient."""
    # No call for each of them: a step asks anew, and a model may have thousands.
    return [n for n, each in enumerate(parameters) if each._post_accumulate_grad_hooks]


def has_backward_hooks(module: torch.nn.Module) -> bool:
    """Whether a module has hooks that backward calls."""
    return bool(module._backward_hooks or module._backward_pre_hooks)


@contextmanager
def hide_backward_hooks(module: torch.nn.Module) -> Iterator[None]:
    """A block in which calls of a module do not see its backward hooks."""
    names = ("_backward_hooks", "_backward_pre_hooks")
    held = {name: vars(module)[name] for name in names}
    vars(module).update({name: OrderedDict() for name in names})
    try:
        yield
    finally:
        vars(module).update(held)


@contextmanager
def watch_differentiation(look: Callable[[Sequence[Any], Sequence[Any]], None]) -> Iterator[None]:
    """A block in which something is called with what is differentiated, and with what by.

    That is with the outputs, and the inputs or nothing if those are all leaves.
    """
    # Both torch.autograd.grad and backward call it by this name, wherever they are imported to.
    inner = _AUTOGRAD._engine_run_backward

    def watched(outputs: Sequence[Any], *args: Any, **kwargs: Any) -> Any:
        look(outputs, args[3])
        return inner(outputs, *args, **kwargs)

    _AUTOGRAD._engine_run_backward = watched
    try:
        yield
    finally:
        _AUTOGRAD._engine_run_backward = inner
