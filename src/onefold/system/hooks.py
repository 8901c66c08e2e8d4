"""What PyTorch keeps to itself about modules, optimizers, and the hooks on both.

As for ``compat.py``, ``tests/system/test_compat.py`` says for each name what would break.
"""

from __future__ import annotations

import operator
import sys
from collections import OrderedDict
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from types import FrameType
from typing import Any

import torch
import torch.utils.checkpoint
from torch.nn.utils import clip_grad

__all__ = [
    "ProcessHooks",
    "buffers_of",
    "children_of",
    "complete_hooks",
    "has_backward_hooks",
    "hide_backward_hooks",
    "hooked",
    "is_in_list_clipping",
    "parameters_of",
    "replaces_step",
    "step_hooks",
    "steps_a_scheduler",
    "watch_differentiation",
    "wrap_clipping",
]

_AUTOGRAD: Any = torch.autograd
_CHECKPOINT: Any = torch.utils.checkpoint
_OPTIMIZER: Any = sys.modules["torch.optim.optimizer"]  # torch.optim does not show it
_CLIP = "_clip_grads_with_norm_"


# `named_parameters()` walks the whole tree, skips None, and leaves out the second name of a tied
# parameter; whoever replaces parameters needs every place.
parameters_of: Callable[[torch.nn.Module], dict[str, torch.nn.Parameter | None]]
parameters_of = operator.attrgetter("_parameters")
"""The table in which a module holds its own parameters."""


children_of: Callable[[torch.nn.Module], dict[str, torch.nn.Module | None]]
children_of = operator.attrgetter("_modules")
"""The table in which a module holds the modules that are its own."""


buffers_of: Callable[[torch.nn.Module], dict[str, torch.Tensor | None]]
buffers_of = operator.attrgetter("_buffers")
"""The table in which a module holds its own buffers."""


def steps_a_scheduler(step: Callable[..., object]) -> bool:
    """Whether a learning rate scheduler has wrapped an optimizer's step method."""
    return hasattr(step, "_wrapped_by_lr_sched")


def replaces_step(optimizer: torch.optim.Optimizer) -> bool:
    """Whether an optimizer has a step of its own beside that of its class."""
    own = vars(optimizer).get("step")
    # A scheduler puts a function there that only notes the call, around what it found.
    noted = own is not None and steps_a_scheduler(own)
    return own is not None and not (noted and own.__wrapped__ is type(optimizer).step)


def is_in_list_clipping(frame: FrameType) -> bool:
    """Whether a frame is that of a ``clip_grad_norm_`` that was given several parameters.

    They count as several if they came in a list, however many there are in it.
    """
    return "is_generator" in frame.f_locals


def wrap_clipping(wrap: Callable[[Callable[..., Any]], Callable[..., Any]]) -> None:
    """Wrap the function that ``clip_grad_norm_`` calls; only once, however often this is called."""
    inner: Callable[..., Any] | None = getattr(clip_grad, _CLIP, None)
    if inner is None or hasattr(inner, "__onefold__"):
        return
    wrapped = wrap(inner)
    wrapped.__onefold__ = True  # type: ignore[attr-defined]
    setattr(clip_grad, _CLIP, wrapped)


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


def complete_hooks(optimizer: torch.optim.Optimizer) -> None:
    """Give an optimizer the tables of hooks that its class has not made.

    Some that wrap another (Lookahead) never call ``Optimizer.__init__``.
    """
    # Not by Optimizer.__setstate__, which would also wrap the step of the class: other instances
    # of it, which lack the tables, could then no longer step.
    names = (each for each in torch.optim.Optimizer.__annotations__ if each.endswith("_hooks"))
    vars(optimizer).update({name: OrderedDict() for name in names} | vars(optimizer))


def step_hooks(optimizer: torch.optim.Optimizer) -> list[Callable[..., Any]]:
    """The hooks on an optimizer's step, those on the steps of all optimizers among them."""
    of_all = _OPTIMIZER._global_optimizer_pre_hooks, _OPTIMIZER._global_optimizer_post_hooks
    own = (vars(optimizer).get(f"_optimizer_step_{w}_hooks", {}) for w in ("pre", "post"))
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
def watch_differentiation(
    inspect: Callable[[Sequence[Any], Sequence[Any]], None],
) -> Iterator[None]:
    """A block in which something is called with what is differentiated, and with what by.

    That is with the outputs, and the inputs or nothing if those are all leaves.
    """
    # Both torch.autograd.grad and backward call it by this name, wherever they are imported to.
    inner = _AUTOGRAD._engine_run_backward

    def watched(outputs: Sequence[Any], *args: Any, **kwargs: Any) -> Any:
        inspect(outputs, args[3])
        return inner(outputs, *args, **kwargs)

    _AUTOGRAD._engine_run_backward = watched
    try:
        yield
    finally:
        _AUTOGRAD._engine_run_backward = inner
