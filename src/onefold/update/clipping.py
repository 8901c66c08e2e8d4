"""Refuses lines of a plain loop that have no effect beside ``trainer.step``.

Note: the one function of PyTorch that is replaced
--------------------------------------------------
``torch.nn.utils.clip_grad_norm_`` looks at ``.grad`` alone: where there is none it returns 0 and
clips nothing. It ends in a call of a function of its own module that is given the parameters; that
one is wrapped, once, when the first Trainer is made. For everybody else's parameters it does what
it did before. Where a release of PyTorch has no such function, nothing is wrapped.

Inside an optimizer's step, which a hook or a ``step`` of a script's own may call it in, there are
those parameters that the device updates: a norm of several would be another on each device.
"""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch.utils.weak import WeakTensorKeyDictionary

from onefold.system.hooks import is_in_list_clipping, wrap_clipping

__all__ = ["allow_clipping", "clipping_each", "refuse_clipping"]

# Parameters of any Trainer: by identity, as tensors compare by element, and weakly, so that this
# table keeps no model alive.
_ours = WeakTensorKeyDictionary()
_steps: list[str] = []
"""The optimizers in whose step this process is."""


def refuse_clipping(parameters: Iterable[torch.nn.Parameter]) -> None:
    """Have ``clip_grad_norm_`` of these parameters raise where it would do nothing."""
    for parameter in parameters:
        _ours[parameter] = True
    wrap_clipping(_checked)


def allow_clipping(parameters: Iterable[torch.nn.Parameter]) -> None:
    """Have ``clip_grad_norm_`` do what it ever did: the script asks for gradients by itself."""
    for parameter in parameters:
        if parameter in _ours:
            del _ours[parameter]


@contextmanager
def clipping_each(name: str) -> Iterator[None]:
    """Have ``clip_grad_norm_`` take one parameter at a time inside this context.

    Args:
        name: of the optimizer that steps in it.
    """
    _steps.append(name)
    try:
        yield
    finally:
        _steps.pop()


def _checked(inner: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(inner)
    def clip(parameters: Any, *args: Any, **kwargs: Any) -> Any:
        # A list, as parameters may come as a generator, which can be gone through only once.
        listed = [parameters] if isinstance(parameters, torch.Tensor) else list(parameters)
        if _steps and is_in_list_clipping(sys._getframe(1)):
            raise RuntimeError(
                f"clip_grad_norm_ was given several parameters in the step of {_steps[-1]} (in a "
                f"hook, or a step of its own), where a device has those alone that it updates: the "
                f"norm would depend on the number of devices. For the norm of all give clip_norm "
                f"to Trainer; for that of each, call clip_grad_norm_(parameter, ...) one by one"
            )
        if any(p in _ours for p in listed) and not any(p.grad is not None for p in listed):
            raise RuntimeError(
                "clip_grad_norm_ was called for parameters of a Trainer, which have no gradients "
                "between steps: it would do nothing. Remove the line and give clip_norm to Trainer"
            )
        return inner(listed, *args, **kwargs)

    return clip
