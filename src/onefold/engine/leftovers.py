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
from torch.nn.utils import clip_grad
from torch.utils.weak import WeakTensorKeyDictionary

__all__ = ["refuse_clipping"]

_INNER = "_clip_grads_with_norm_"
_ours = WeakTensorKeyDictionary()


def refuse_clipping(parameters: Iterable[torch.nn.Parameter]) -> None:
    """Have ``clip_grad_norm_`` of these parameters raise where it would do nothing."""
    for parameter in parameters:
        _ours[parameter] = True
    inner: Callable[..., Any] | None = getattr(clip_grad, _INNER, None)
    if inner is not None and not hasattr(inner, "__onefold__"):
        setattr(clip_grad, _INNER, _checked(inner))


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

    clip.__onefold__ = True  # type: ignore[attr-defined]
    return clip
