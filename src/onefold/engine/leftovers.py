"""Lines of a plain loop that do nothing any more after ``trainer.step``, and so must not pass.

Note: the one function of PyTorch that is replaced
--------------------------------------------------
``torch.nn.utils.clip_grad_norm_`` looks at ``.grad`` alone: where there is none it returns 0 and
clips nothing. It ends in a call of a function of its own module that is given the parameters; that
one is wrapped, once, when the first Trainer is made. It does what it did for everybody else's
parameters. Where a release of PyTorch has no such function, nothing is done.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch.utils.weak import WeakTensorKeyDictionary

from onefold.system.compat import wrap_clipping

__all__ = ["refuse_clipping"]

_ours = WeakTensorKeyDictionary()


def refuse_clipping(parameters: Iterable[torch.nn.Parameter]) -> None:
    """Have ``clip_grad_norm_`` of these parameters raise where it would do nothing."""
    for parameter in parameters:
        _ours[parameter] = True
    wrap_clipping(_checked)


def _checked(inner: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(inner)
    def clip(parameters: Any, *args: Any, **kwargs: Any) -> Any:
        listed = [parameters] if isinstance(parameters, torch.Tensor) else list(parameters)
        if any(p in _ours for p in listed) and not any(p.grad is not None for p in listed):
            raise RuntimeError(
                "clip_grad_norm_ was called for parameters of a Trainer, which have no gradients "
                "between steps: it would do nothing. Remove the line and give clip_norm to Trainer"
            )
        return inner(listed, *args, **kwargs)

    return clip
