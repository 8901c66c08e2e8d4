"""Which dtypes are known of tensors without values, where autocast may cast.

Autocast casts what is on a device, not what has a shape alone: a hollow tensor has the dtype that
would come without it, and is unsure of it if an operation that casts was among those it is made of.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import torch

__all__ = ["gives_unsure", "tells_dtype"]

_CASTING = re.compile(
    "mm|mv|addr|matmul|conv|linear|attention|rnn|lstm|gru|cell|einsum|dot|inner|prelu|transformer"
    "|linalg|matrix|cov|corr"
)
"""In the names of operations that autocast may do in a lower precision, on any kind of device."""

_PROMOTING = re.compile(
    "(__)?[ri]?(add|sub|mul|div|truediv|cat|concat|stack|hstack|vstack|where)_*"
)
"""Of operations that give the widest dtype of those of the tensors that they are given."""
_WIDE = (torch.float32, torch.float64)

_ATTRIBUTES: Sequence[Any] = (torch.Tensor.dtype, torch.Tensor.itemsize, torch.Tensor.nbytes)
_ASKING: Sequence[Any] = (
    *(attribute.__get__ for attribute in _ATTRIBUTES),
    torch.Tensor.element_size,
    torch.result_type,
)
_CASTS = ("float", "double", "half", "bfloat16")


def tells_dtype(func: Callable[..., Any], args: Sequence[Any], kwargs: Mapping[str, Any]) -> bool:
    """Whether what a call gives to Python depends on the dtype of a tensor."""
    if func == torch.Tensor.type:
        return len(args) == 1 and not kwargs
    if func == torch.Tensor.to:
        return any(isinstance(value, torch.Tensor) for value in (*args[1:], *kwargs.values()))
    return func in _ASKING


def gives_unsure(
    name: str,
    args: Iterable[Any],
    kwargs: Mapping[str, Any],
    forms: Iterable[tuple[torch.Tensor, bool]],
    device: str,
) -> bool:
    """Whether the dtype of what an operation makes is unsure.

    Args:
        name: the operation's.
        args: what it is given by position.
        kwargs: what it is given by name.
        forms: the tensors in these, without values, and whether the dtype of each is unsure.
        device: the kind of device for which it stands.
    """
    if name in _CASTS or any(isinstance(v, torch.dtype) for v in (*args, *kwargs.values())):
        return False
    if torch.is_autocast_enabled(device) and _CASTING.search(name):
        return True
    forms = list(forms)
    if _PROMOTING.fullmatch(name) and any(
        not is_unsure and form.dtype in _WIDE and form.dim() > 0 for form, is_unsure in forms
    ):
        return False
    return any(is_unsure for _, is_unsure in forms)
