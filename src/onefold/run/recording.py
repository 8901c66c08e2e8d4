"""Notes how the tensors of a model come about, and leaves the large ones without values.

Note: what is drawn while it is noted
-------------------------------------
Whoever draws later, a dropout layer or the script, must find the generator where the plain way
leaves it. So each call that draws is made, on memory that is let go at once, and made again when
the values are needed, from the state that the generator had.

Note: what cannot be noted
--------------------------
Calls that look at values, and those that nobody here knows, get them: the tensors are drawn then,
in their file. So are those of which somebody else than a parameter of the model has a view at the
end, as nobody would notice when it is read.
"""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from types import EllipsisType, FunctionType, NoneType
from typing import Any

import torch
from torch.overrides import TorchFunctionMode

from onefold.core.flat import extent
from onefold.core.recipe import Around, Generation, Made, Recipe, Reference, View, replaced
from onefold.core.structure import parts_of
from onefold.engine.firstvalues import Undrawn, put_off
from onefold.engine.hollow import tensors_of
from onefold.engine.lentparameter import is_harmless
from onefold.system.compat import (
    asking_for_truncated_normal,
    fits_in_place,
    holders_of,
    truncated_normal,
)
from onefold.system.heap import DiskHeap

__all__ = ["Recording"]

_SMALL_BYTES = 64 << 10
"""A tensor with values of up to this size is copied where a call that is noted was given it."""


@dataclass(slots=True)
class _Waiting:
    """Memory without values."""

    memory: torch.Tensor
    """(bytes,) uint8"""
    holders: int
    """How many tensors lay in it before any of the script's did."""
    recipe: Recipe


class Recording(TorchFunctionMode):
    """Has PyTorch's functions make large tensors without values, as far as that is possible.

    Args:
        heap: the file in which they lie if they are drawn after all.
        least_bytes: smaller tensors are ordinary.
    """

    def __init__(self, heap: DiskHeap, least_bytes: int) -> None:
        super().__init__()
        self._heap, self._least_bytes = heap, least_bytes
        self._waiting: dict[int, _Waiting] = {}
        """By the address of the memory."""

    def __torch_function__(
        self,
        func: Callable[..., Any],
        types: Any,
        args: Sequence[Any] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        given: dict[str, Any] = dict(kwargs or {})
        if isinstance(func, FunctionType) and not args and "tensor" in given:
            func = _INIT.get(func.__name__, func)
        waiting = [each for each in tensors_of((args, given)) if self._of(each) is not None]
        if waiting:
            return self._of_waiting(func, args, given, waiting)
        if func not in _MAKING:
            return func(*args, **given)
        return self._made(func, args, given)

    @contextmanager
    def noting(self) -> Iterator[None]:
        """Note what is called inside this context."""
        with asking_for_truncated_normal(), self:
            yield

    def finish(self, made: object) -> None:
        """Leave the parameters of what was made without values, and draw all the rest."""
        parameters = [p for module in _modules_in(made) for p in _parameters_of(module)]
        kept = {address: p for p in parameters if (address := self._alone(p)) is not None}
        # Views that a function has left behind in a cycle are gone afterwards.
        if any(self._has_others(address) for address in kept):
            gc.collect()
        for address, waiting in list(self._waiting.items()):
            if self._is_gone(address):
                continue
            if address in kept and not self._has_others(address):
                view = View.of(kept[address])
                values = Undrawn(waiting.recipe, view, waiting.memory, self._heap)
                put_off(kept[address], values)
            else:
                self._draw(address)
        self._waiting.clear()

    def draw_all(self) -> None:
        """Draw what has no values yet."""
        for address in list(self._waiting):
            if not self._is_gone(address):
                self._draw(address)

    def _of_waiting(
        self,
        func: Callable[..., Any],
        args: Sequence[Any],
        kwargs: dict[str, Any],
        waiting: Sequence[torch.Tensor],
    ) -> Any:
        """Make a call that was given tensors without values."""
        if is_harmless(func) or func in _ABOUT or _takes_a_view(func, args):
            return func(*args, **kwargs)
        noted = None
        if self._can_note(args, kwargs, waiting):
            if func in _FILLING and _first_of(args, kwargs) is waiting[0]:
                return self._filled(func, args, kwargs, waiting[0])
            if func in _MAKING and not _has_a_graph(waiting):
                noted = self._derived(func, args, kwargs)
        if noted is not None:
            return noted
        for tensor in waiting:
            self._draw_that_of(tensor)
        result = func(*args, **kwargs)
        return self._in_file(func, args, result)

    def _filled(
        self,
        func: Callable[..., Any],
        args: Sequence[Any],
        kwargs: dict[str, Any],
        target: torch.Tensor,
    ) -> Any:
        """Note a call that writes to its first argument."""
        into = self._of(target)
        assert into is not None
        around = Around.now()
        if func not in _DRAWING:
            around = replace(around, state=None)
        noted = self._noted((tuple(args), kwargs), into)
        if func in _DRAWING:
            # For the generator's sake, where each tensor lies as it does.
            scratch = Recipe(into.recipe.nbytes).made()
            rehearsed = replaced(noted, Reference, lambda each: each.tensor(scratch))
            given = iter(_generators(args, kwargs))
            rehearsed = replaced(rehearsed, Generation, lambda _: next(given))
            with torch.no_grad():
                func(*rehearsed[0], **rehearsed[1])
        call = Made(function=func, args=noted[0], kwargs=noted[1], around=around)
        into.recipe = into.recipe.then(call)
        return None if func is torch.Tensor.__setitem__ else target

    def _derived(
        self, func: Callable[..., Any], args: Sequence[Any], kwargs: dict[str, Any]
    ) -> torch.Tensor | None:
        """Note a call that makes a tensor of others; None if that is not possible."""
        around = Around.now()
        noted = self._noted((tuple(args), kwargs), None, read=func not in _LIKE)
        scratches: dict[int, torch.Tensor] = {}

        def scratch(tensor: torch.Tensor) -> torch.Tensor:
            waiting = self._of(tensor)
            if waiting is None:
                return tensor
            address = waiting.memory.data_ptr()
            if address not in scratches:
                scratches[address] = Recipe(waiting.recipe.nbytes).made()
            return View.of(tensor).within(scratches[address])

        rehearsed = replaced((tuple(args), kwargs), torch.Tensor, scratch)
        with torch.no_grad():
            result = func(*rehearsed[0], **rehearsed[1])
        if not isinstance(result, torch.Tensor) or not self._is_large(result):
            torch.set_rng_state(_known(around.state))
            return None
        address = result.untyped_storage().data_ptr()
        if any(address == each.untyped_storage().data_ptr() for each in scratches.values()):
            # A conversion that has nothing to do: it returns what it was given.
            return func(*args, **kwargs)  # type: ignore[no-any-return]
        return self._put_off(None if func in _EMPTY else func, noted, around, result)

    def _made(self, func: Callable[..., Any], args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
        """Make a call that makes a tensor, of which no argument waits for values."""
        around = Around.now()
        noted = None
        if func not in _OF_LISTS and self._can_note(args, kwargs, ()):
            noted = self._noted((tuple(args), kwargs), None)
        result = func(*args, **kwargs)
        large = isinstance(result, torch.Tensor) and self._is_large(result)
        if noted is None or not large or _is_of(result, args):
            return self._in_file(func, args, result)
        return self._put_off(None if func in _EMPTY else func, noted, around, result)

    def _put_off(
        self,
        func: Callable[..., Any] | None,
        noted: tuple[Any, Any],
        around: Around,
        result: torch.Tensor,
    ) -> torch.Tensor:
        """Note how a tensor was made, and let its values go; those of None are of no matter."""
        start, stop = extent(result)
        memory = self._heap.bare(stop - start)
        recipe = Recipe(memory.numel())
        view = View(result.dtype, tuple(result.shape), tuple(result.stride()), 0)
        if func is not None:
            if torch.equal(torch.get_rng_state(), _known(around.state)):
                around = replace(around, state=None)
            call = Made(function=func, args=noted[0], kwargs=noted[1], around=around, target=view)
            recipe = recipe.then(call)
        holders = holders_of(memory.untyped_storage())
        result.data = view.within(memory)
        self._waiting[memory.data_ptr()] = _Waiting(memory, holders, recipe)
        return result

    def _noted(self, given: Any, into: _Waiting | None, *, read: bool = True) -> Any:
        """What is kept of the arguments of a call, as they may be changed later.

        Args:
            given: the arguments.
            into: the memory that the call writes to, if it is one without values.
            read: whether it looks at the values of tensors, and not at their shapes alone.
        """

        def reference(tensor: torch.Tensor) -> object:
            waiting = self._of(tensor)
            if waiting is None:
                return tensor.detach().clone()
            recipe = waiting.recipe if read else Recipe(waiting.recipe.nbytes)
            return Reference(View.of(tensor), None if waiting is into else recipe)

        noted = replaced(given, torch.Tensor, reference)
        return replaced(noted, torch.Generator, lambda each: Generation(each.get_state()))

    def _can_note(
        self, args: Sequence[Any], kwargs: Mapping[str, Any], waiting: Sequence[torch.Tensor]
    ) -> bool:
        """Whether all arguments can be kept for a second call."""
        if kwargs.get("out") is not None:
            return False
        but = set(map(id, waiting))
        others = [each for each in tensors_of((args, kwargs)) if id(each) not in but]
        return all(map(_can_be_copied, others)) and _can_be_kept((args, kwargs))

    def _in_file(self, func: Callable[..., Any], args: Sequence[Any], result: Any) -> Any:
        """Have a tensor with values lie in the file, if this call has made it."""
        is_new = func in _MAKING and isinstance(result, torch.Tensor) and not _is_of(result, args)
        if is_new and result.device.type == "cpu" and result.layout == torch.strided:
            result.data = self._heap.kept(result.data)
        return result

    def _is_large(self, tensor: torch.Tensor) -> bool:
        ordinary = tensor.device.type == "cpu" and tensor.layout == torch.strided
        return ordinary and type(tensor) is torch.Tensor and tensor.nbytes >= self._least_bytes

    def _of(self, tensor: torch.Tensor) -> _Waiting | None:
        """The memory without values that a tensor lies in, if it does."""
        if tensor.device.type != "cpu" or tensor.layout != torch.strided:
            return None
        return self._waiting.get(tensor.untyped_storage().data_ptr())

    def _alone(self, parameter: torch.nn.Parameter) -> int | None:
        """The address of the memory of a parameter that has no values, and fills it."""
        waiting = self._of(parameter)
        if waiting is None:
            return None
        start, stop = extent(parameter)
        whole = stop - start == parameter.nbytes == waiting.recipe.nbytes
        address = waiting.memory.data_ptr()
        return address if whole and start == address else None

    def _is_gone(self, address: int) -> bool:
        waiting = self._waiting[address]
        return holders_of(waiting.memory.untyped_storage()) <= waiting.holders

    def _has_others(self, address: int) -> bool:
        waiting = self._waiting[address]
        return holders_of(waiting.memory.untyped_storage()) > waiting.holders + 1

    def _draw_that_of(self, tensor: torch.Tensor) -> None:
        waiting = self._of(tensor)
        if waiting is not None:
            self._draw(waiting.memory.data_ptr())

    def _draw(self, address: int) -> None:
        waiting = self._waiting[address]
        self._heap.provide(waiting.memory)
        waiting.recipe.fill(waiting.memory)
        del self._waiting[address]


def _modules_in(made: object) -> Iterator[torch.nn.Module]:
    """The modules in nested containers, or the module itself."""
    if isinstance(made, torch.nn.Module):
        yield made
        return
    for _, part in parts_of(made) or ():
        yield from _modules_in(part)


def _parameters_of(module: torch.nn.Module) -> Iterable[torch.nn.Parameter]:
    """The parameters of a module that say when they are used."""
    # What is scripted computes with them beyond Python.
    scripted = any(isinstance(part, torch.jit.ScriptModule) for part in module.modules())
    return () if scripted else module.parameters()


def _can_be_copied(tensor: torch.Tensor) -> bool:
    """Whether a tensor is small, or takes no memory at all."""
    return tensor.is_meta or (tensor.device.type == "cpu" and tensor.nbytes <= _SMALL_BYTES)


def _can_be_kept(value: object) -> bool:
    """Whether an argument is still the same later, or can be copied."""
    if isinstance(value, torch.Generator):
        return value.device.type == "cpu"
    parts = None if isinstance(value, torch.Tensor) else parts_of(value)
    if parts is None:
        return isinstance(value, _LASTING)
    return all(_can_be_kept(part) for _, part in parts)


def _first_of(args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
    """The first argument: functions of torch.nn.init name theirs."""
    return args[0] if args else kwargs.get("tensor")


def _has_a_graph(tensors: Iterable[torch.Tensor]) -> bool:
    """Whether autograd would note what is made of tensors."""
    return torch.is_grad_enabled() and any(tensor.requires_grad for tensor in tensors)


def _generators(args: Sequence[Any], kwargs: Mapping[str, Any]) -> Iterable[torch.Generator]:
    return [each for each in (*args, *kwargs.values()) if isinstance(each, torch.Generator)]


def _known(state: torch.Tensor | None) -> torch.Tensor:
    assert state is not None
    return state


def _takes_a_view(func: Callable[..., Any], args: Sequence[Any]) -> bool:
    """Whether a call gives a view of its first argument, and looks at nothing in it."""
    if func is torch.Tensor.__getitem__:
        place = args[1] if isinstance(args[1], tuple) else (args[1],)
        kinds = int, slice, NoneType, EllipsisType
        return all(isinstance(each, kinds) and not isinstance(each, bool) for each in place)
    return func in _VIEWING


def _is_of(result: torch.Tensor, args: Sequence[Any]) -> bool:
    """Whether a conversion gave what it was given, or has to do nothing but name it anew."""
    address = result.untyped_storage().data_ptr()
    given = [each for each in args if isinstance(each, torch.Tensor)]
    return any(
        each.layout == torch.strided and each.untyped_storage().data_ptr() == address
        for each in given
    )


_LASTING = (
    *(bool, int, float, complex, str, slice, NoneType, EllipsisType, torch.Tensor),
    *(torch.dtype, torch.device, torch.layout, torch.memory_format),
)
"""Kinds of arguments that nobody changes, and tensors, which are copied."""
_T = torch.Tensor
_EMPTY = frozenset({torch.empty, torch.empty_strided, torch.empty_like, _T.new_empty})
"""What makes tensors of any content."""
_OF_LISTS = frozenset({torch.tensor})
"""What is given values that the script may change."""
_LIKE = frozenset(
    {
        *(torch.empty_like, torch.zeros_like, torch.ones_like, torch.full_like, torch.rand_like),
        *(torch.randn_like, _T.new_empty, _T.new_zeros, _T.new_ones, _T.new_full),
    }
)
"""What makes tensors by the shape of another one."""
_MAKING = frozenset(
    {
        *_EMPTY,
        *_OF_LISTS,
        *_LIKE,
        *(torch.zeros, torch.ones, torch.full, torch.eye, torch.arange, torch.linspace),
        *(torch.rand, torch.randn, torch.randint, torch.normal, torch.cat, torch.stack),
        *(torch.clone, _T.clone, _T.contiguous, _T.to),
        *(_T.float, _T.double, _T.half, _T.bfloat16),
    }
)
"""What makes tensors that nobody else refers to, unless they are among what it was given."""
_INIT: dict[str, Callable[..., Any]] = {
    each.__name__: each
    for each in (
        *(torch.nn.init.uniform_, torch.nn.init.normal_, torch.nn.init.constant_),
        torch.nn.init.kaiming_uniform_,
    )
}
"""Functions that ask a mode what to do, by name: they name themselves as their module does then,
where a library may have put others in their places meanwhile."""
_DRAWING = frozenset(
    {
        *(_T.uniform_, _T.normal_, _T.random_, _T.bernoulli_, _T.exponential_, _T.cauchy_),
        *(_T.log_normal_, _T.geometric_, truncated_normal),
        *(each for name, each in _INIT.items() if name != "constant_"),
    }
)
"""What draws random numbers for its first argument."""
_FILLING = frozenset(
    {
        *_DRAWING,
        _INIT["constant_"],
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
_ABOUT = frozenset({_T.stride, _T.storage_offset, _T.is_contiguous, fits_in_place})
"""What looks at the place and the kind of a tensor alone."""
