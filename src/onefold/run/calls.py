"""What PyTorch's functions do with tensors that have no values yet: which may be called, or noted.

A function that is in none of these tables may read values, so tensors get theirs before it is
called.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from types import EllipsisType, NoneType
from typing import Any

import torch
from torch.nn.parameter import is_lazy

from onefold.core.recipe import Reference, replaced
from onefold.core.structure import parts_of
from onefold.system.compat import fits_in_place, truncated_normal

__all__ = [
    "ABOUT",
    "ADDRESSES",
    "DRAWING",
    "EMPTY",
    "FILLING",
    "INIT",
    "LIKE",
    "MAKING",
    "OF_LISTS",
    "can_be_copied",
    "can_be_kept",
    "first_of",
    "generators",
    "has_a_graph",
    "is_of",
    "is_own",
    "is_possible",
    "reads_all",
    "takes_a_view",
    "tensors_in",
]

_SMALL_BYTES = 64 << 10
"""A tensor with values of up to this size is copied where a call that is noted was given it."""


def tensors_in(value: object) -> Iterator[torch.Tensor]:
    """The tensors among arguments, also where they are the bounds of a slice."""
    if isinstance(value, torch.Tensor):
        yield value
        return
    if isinstance(value, slice):
        value = (value.start, value.stop, value.step)
    for _, part in parts_of(value) or ():
        yield from tensors_in(part)


def can_be_copied(tensor: torch.Tensor) -> bool:
    """Whether a tensor is small, or takes no memory at all."""
    return tensor.is_meta or (tensor.device.type == "cpu" and tensor.nbytes <= _SMALL_BYTES)


def can_be_kept(value: object) -> bool:
    """Whether an argument is still the same later, or can be copied."""
    if isinstance(value, torch.Generator):
        return value.device.type == "cpu"
    parts = None if isinstance(value, torch.Tensor) else parts_of(value)
    if parts is None:
        return isinstance(value, _LASTING) or _is_lasting_slice(value)
    return all(can_be_kept(part) for _, part in parts)


def _is_lasting_slice(value: object) -> bool:
    bounds = (value.start, value.stop, value.step) if isinstance(value, slice) else (value,)
    return isinstance(value, slice) and all(isinstance(each, int | None) for each in bounds)


def first_of(args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
    """The first argument: functions of torch.nn.init name theirs."""
    return args[0] if args else kwargs.get("tensor")


def has_a_graph(tensors: Iterable[torch.Tensor]) -> bool:
    """Whether autograd would note what is made of tensors."""
    return torch.is_grad_enabled() and any(tensor.requires_grad for tensor in tensors)


def generators(args: Sequence[Any], kwargs: Mapping[str, Any]) -> Iterable[torch.Generator]:
    return [each for each in (*args, *kwargs.values()) if isinstance(each, torch.Generator)]


def takes_a_view(func: Callable[..., Any], args: Sequence[Any], kwargs: Mapping[str, Any]) -> bool:
    """Whether a call gives a view of its first argument, and looks at nothing in it."""
    # Nor in another one: a tensor may be the number of a row.
    if not args or next(tensors_in((args[1:], kwargs)), None) is not None:
        return False
    if func is torch.Tensor.__getitem__:
        place = args[1] if isinstance(args[1], tuple) else (args[1],)
        kinds = int, NoneType, EllipsisType
        return all(
            _is_lasting_slice(each) or (isinstance(each, kinds) and not isinstance(each, bool))
            for each in place
        )
    return func in _VIEWING


def reads_all(func: Callable[..., Any], args: Sequence[Any], kwargs: Mapping[str, Any]) -> bool:
    """Whether a call makes a tensor of others, element by element, or by their shape alone."""
    if func in _JOINING:
        return True
    alone = bool(args) and next(tensors_in((args[1:], kwargs)), None) is None
    return alone and func in (LIKE | _CHANGING) and not generators(args, kwargs)


def is_possible(func: Callable[..., Any], noted: tuple[Any, Any]) -> bool:
    """Whether a call would go well, by the shapes of what it is given."""
    on_meta = replaced(noted, Reference, lambda each: each.view.on_meta())
    try:
        func(*on_meta[0], **on_meta[1])
    except Exception:
        # Whatever is wrong, PyTorch reports of the call itself: it is made with values.
        return False
    return True


def is_own(func: object) -> bool:
    """Whether a function sees to it by itself that autograd notes nothing."""
    return func in INIT.values() or func is truncated_normal


def is_of(result: torch.Tensor, given: object) -> bool:
    """Whether a call gave what it was given, or has to do nothing but name it anew."""
    address = result.untyped_storage().data_ptr()
    return any(
        each.layout == torch.strided
        and not is_lazy(each)
        and not each.is_meta
        and each.untyped_storage().data_ptr() == address
        for each in tensors_in(given)
    )


_LASTING = (
    *(bool, int, float, complex, str, NoneType, EllipsisType, torch.Tensor),
    *(torch.dtype, torch.device, torch.layout, torch.memory_format),
)
"""Kinds of arguments that nobody changes, and tensors, which are copied."""
_T = torch.Tensor
EMPTY = frozenset({torch.empty, torch.empty_strided, torch.empty_like, _T.new_empty})
"""What makes tensors of any content."""
OF_LISTS = frozenset({torch.tensor})
"""What is given values that the script may change."""
LIKE = frozenset(
    {
        *(torch.empty_like, torch.zeros_like, torch.ones_like, torch.full_like, torch.rand_like),
        *(torch.randn_like, _T.new_empty, _T.new_zeros, _T.new_ones, _T.new_full),
    }
)
"""What makes tensors by the shape of another one."""
_JOINING = frozenset({torch.cat, torch.stack})
_CHANGING = frozenset(
    {
        *(torch.clone, _T.clone, _T.contiguous, _T.to),
        *(_T.float, _T.double, _T.half, _T.bfloat16),
        *(_T.add, _T.sub, _T.mul, _T.div, torch.add, torch.sub, torch.mul, torch.div, _T.neg),
        *(_T.__add__, _T.__radd__, _T.__sub__, _T.__rsub__, _T.__mul__, _T.__rmul__),
        *(_T.__truediv__, _T.__neg__, _T.clamp, torch.clamp),
    }
)
"""What makes a tensor of another one, element by element."""
MAKING = frozenset(
    {
        *EMPTY,
        *OF_LISTS,
        *LIKE,
        *_JOINING,
        *_CHANGING,
        *(torch.zeros, torch.ones, torch.full, torch.eye, torch.arange, torch.linspace),
        *(torch.rand, torch.randn, torch.randint, torch.normal),
    }
)
"""What makes tensors that nobody else refers to, unless they are among what it was given."""
INIT: dict[str, Callable[..., Any]] = {
    each.__name__: each
    for each in (
        *(torch.nn.init.uniform_, torch.nn.init.normal_, torch.nn.init.constant_),
        torch.nn.init.kaiming_uniform_,
    )
}
"""Functions that ask a mode what to do, by name: they name themselves as their module does then,
where a library may have put others in their places meanwhile."""
DRAWING = frozenset(
    {
        *(_T.uniform_, _T.normal_, _T.random_, _T.bernoulli_, _T.exponential_, _T.cauchy_),
        *(_T.log_normal_, _T.geometric_, truncated_normal),
        *(each for name, each in INIT.items() if name != "constant_"),
    }
)
"""What draws random numbers for its first argument."""
FILLING = frozenset(
    {
        *DRAWING,
        INIT["constant_"],
        *(_T.zero_, _T.fill_, _T.mul_, _T.add_, _T.sub_, _T.div_, _T.clamp_, _T.erfinv_),
        *(_T.copy_, _T.__setitem__, _T.__imul__, _T.__iadd__, _T.__isub__, _T.__itruediv__),
    }
)
"""What writes to its first argument, and returns it."""
_VIEWING = frozenset(
    {
        *(_T.data.__get__, _T.T.__get__, _T.mT.__get__),  # type: ignore[attr-defined]
        *(_T.detach, _T.view, _T.narrow, _T.select, _T.chunk, _T.split, _T.transpose, _T.t),
        *(_T.permute, _T.unsqueeze, _T.squeeze, _T.as_strided, _T.expand, _T.unbind, _T.view_as),
        *(torch.detach, torch.narrow, torch.select, torch.chunk, torch.split, torch.transpose),
        *(torch.permute, torch.unsqueeze, torch.squeeze, torch.unbind),
    }
)
"""What gives views of its first argument, and looks at nothing in it."""
ADDRESSES = frozenset({_T.data_ptr})
"""What tells where values are, to be read past PyTorch."""
ABOUT = frozenset({_T.stride, _T.storage_offset, _T.is_contiguous, fits_in_place})
"""What looks at the place and the kind of a tensor alone."""
