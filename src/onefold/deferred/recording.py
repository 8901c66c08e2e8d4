"""Records how the tensors of a model come about, and leaves the large ones without values.

`build` makes a model in this way. `Recording` sees each operation at PyTorch's dispatcher, where
all functions end up as a few operations that make, fill and view tensors:

- An operation that makes a tensor (``empty``, ``randn``, ``mul``) gives a large one memory without
  room, and a recipe: the calls that make its values.
- An operation that fills such a tensor (``normal_``, ``copy_``, ``mul_``) is added to its recipe.
- A view lies in the memory of its tensor, and so has the same recipe.
- Any other operation is given values: its tensors are drawn before it runs, each in a file.

Note: what is drawn while it is recorded
----------------------------------------
Whoever draws next, a dropout layer or the script, must find the generator as the plain way leaves
it. So each recorded operation also runs at once, on scratch memory that is freed at once: this
advances the generator, gives the shape of the result, and finds errors. When values are needed, the
operation runs again, from the state that the generator had.

Note: what bypasses the dispatcher
----------------------------------
Some methods (``numpy``, ``tolist``, ``data_ptr``) read memory without an operation. `_DirectReads`
sees them as functions, and draws first. ``trunc_normal_`` looks at what it has drawn to decide what
to draw again: it is recorded as if it were one operation, or each model that uses it would be
drawn.

Note: who else may look
-----------------------
At the end only parameters of the model stay without values, and of these only the ones in whose
memory no other tensor lies: nobody would notice when another one is read. For the same reason
nothing is recorded of which autograd keeps a graph.
"""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
from torch import Tag
from torch.nn.parameter import is_lazy
from torch.overrides import TorchFunctionMode

from onefold.core.flat import extent, is_dense
from onefold.core.structure import parts_of, tensors_of, with_tensors
from onefold.deferred.values import (
    DeferredValues,
    Recipe,
    RecordedCall,
    Reference,
    View,
    defer,
    short_lived,
)
from onefold.system.compat import (
    TorchDispatchMode,
    address_of,
    hidden_from_modes,
    holders_of,
    replacing_truncated_normal,
    writes_to_arguments,
)
from onefold.system.file_memory import SparseAllocator

__all__ = ["Recording"]

_SMALL_BYTES = 64 << 10
"""A tensor with values of up to this size is copied into a recipe that needs it."""
_LONGEST = 250
"""Calls in a recipe: a longer one takes too long to repeat, so its values are drawn at once."""
_COPYING = frozenset(["clone", "_to_copy"])
_KNOWN = frozenset(
    [
        *("empty", "empty_strided", "zeros", "ones", "full", "eye", "arange", "linspace"),
        *("empty_like", "zeros_like", "ones_like", "full_like", "rand_like", "randn_like"),
        *("new_empty", "new_empty_strided", "new_zeros", "new_ones", "new_full"),
        *("rand", "randn", "randint", "randperm", "normal", "_to_copy", "cat", "stack"),
        *("zero_", "fill_", "copy_", "index_put_", "masked_fill_"),
        *("normal_", "uniform_", "random_", "bernoulli_", "exponential_", "cauchy_"),
        *("log_normal_", "geometric_"),
    ]
)
"""Can be recorded, as can what PyTorch calls pointwise: none reads values to decide what to do."""
_T = torch.Tensor
_DIRECT_READS = frozenset(
    [
        *(_T.numpy, _T.tolist, _T.data_ptr, _T.untyped_storage, _T.storage, _T.share_memory_),
        *(_T.apply_, _T.map_, _T.map2_, _T.__array__, _T.__dlpack__, _T.__reduce_ex__),
        *(_T.__deepcopy__, _T.__repr__, _T.__format__, _T.new_tensor),
        *(torch.tensor, torch.as_tensor, torch.asarray),
    ]
)
"""Read memory without an operation, or with operations that no mode sees."""


@dataclass(slots=True)
class _Waiting:
    """Memory without values."""

    memory: torch.Tensor
    """(bytes,) uint8"""
    holders: int
    """How many tensors lay in it before any of the script's did."""
    recipe: Recipe

    @property
    def users(self) -> int:
        """How many tensors of the script's lie in it."""
        return holders_of(self.memory.untyped_storage()) - self.holders

    def is_filled_by(self, tensor: torch.Tensor) -> bool:
        """Whether a tensor that lies in it takes all of it."""
        return tensor.nbytes == self.recipe.nbytes and is_dense(tensor.shape, tensor.stride())


class _DirectReads(TorchFunctionMode):
    """Draws what is about to be read past the dispatcher."""

    def __init__(self, draw: Callable[[torch.Tensor], None]) -> None:
        super().__init__()
        self._draw = draw

    def __torch_function__(
        self,
        func: Callable[..., Any],
        types: Any,
        args: Sequence[Any] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        if func in _DIRECT_READS:
            for tensor in tensors_of((args, kwargs or {})):
                self._draw(tensor)
        return func(*args, **(kwargs or {}))


class Recording(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Has PyTorch's operations make large tensors without values, as far as that is possible.

    Args:
        allocator: where they lie, in files if they are drawn after all.
        least_bytes: smaller tensors are ordinary.
    """

    supports_higher_order_operators = True

    def __init__(self, allocator: SparseAllocator, least_bytes: int) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._allocator, self._least_bytes = allocator, least_bytes
        self._waiting: dict[int, _Waiting] = {}
        """By the address of the storage."""

    @contextmanager
    def active(self) -> Iterator[None]:
        """Record the operations inside this context."""
        with replacing_truncated_normal(self._truncated), _DirectReads(self._draw), self:
            yield

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Sequence[Any] = (), kwargs: Any = None
    ) -> Any:
        given: dict[str, Any] = kwargs or {}
        is_aten = getattr(func, "namespace", None) == "aten"
        if is_aten and func.is_view:
            return func(*args, **given)
        every = list(tensors_of((args, given)))
        has_graph = torch.is_grad_enabled() and any(each.requires_grad for each in every)
        if is_aten and _is_known(func) and not has_graph:
            fills, draws = writes_to_arguments(func), Tag.nondeterministic_seeded in func.tags
            result = self._recorded(func, args, given, fills=fills, draws=draws)
            if result is not None:
                return result
        for tensor in every:
            self._draw(tensor)
        result = func(*args, **given)
        return self._in_file(result) if _name(func) in _COPYING else result

    def finish(self, made: object) -> None:
        """Leave the parameters of what was made without values, and draw all the rest."""
        gc.collect()  # views that a function has left behind in a cycle
        with hidden_from_modes():
            for parameter in (p for module in _modules_in(made) for p in _parameters_of(module)):
                waiting = self._of(parameter)
                if waiting is not None and waiting.users == 1 and waiting.is_filled_by(parameter):
                    values = DeferredValues(
                        waiting.recipe, View.of(parameter), waiting.memory, self._allocator
                    )
                    self._forget(waiting)
                    defer(parameter, values)
        self.draw_all()

    def draw_all(self) -> None:
        """Draw what has no values yet and is still in use."""
        for waiting in list(self._waiting.values()):
            if waiting.users:
                self._draw(waiting.memory)
        self._waiting.clear()

    def _truncated(self, draw: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        """Record a call of what draws for ``trunc_normal_``."""
        result = self._recorded(draw, args, kwargs, fills=True, draws=True)
        return draw(*args, **kwargs) if result is None else result

    def _recorded(
        self, func: Any, args: Sequence[Any], kwargs: dict[str, Any], *, fills: bool, draws: bool
    ) -> torch.Tensor | None:
        """Record an operation and return its result; None if it has to see values.

        Args:
            func: the operation.
            args: its arguments.
            kwargs: its arguments with names.
            fills: whether it writes to the first one.
            draws: whether it draws random numbers.
        """
        with hidden_from_modes():
            into = self._of(args[0]) if fills else None
            every = list(tensors_of((args, kwargs)))
            waiting = [found for each in every if (found := self._of(each)) is not None]
            length = 1 + sum(each.recipe.length for each in waiting)
            stays = getattr(kwargs.get("device"), "type", "cpu") == "cpu"
            possible = stays and length <= _LONGEST and all(map(self._can_be_kept, every))
            if not possible or (fills and into is None):
                return None
            # A call draws from PyTorch's generator, which is given the state of the script's.
            generator = kwargs.get("generator") or torch.default_generator
            given = tuple(args), {n: None if v is generator else v for n, v in kwargs.items()}
            kept = with_tensors(given, partial(self._kept, into))
            state = generator.get_state() if draws else None
            call = RecordedCall(function=func, args=kept[0], kwargs=kept[1], state=state)
            try:
                result, after = self._rehearsed(call, given, into)
            except Exception:
                # PyTorch reports what is wrong when the call is made with values.
                return None
            if into is not None:
                into.recipe = into.recipe.then(call, length)
                result = args[0]
            elif self._is_large(result):
                result = self._without_values(result, call, length)
            elif waiting:
                return None
            if draws:
                generator.set_state(after)
            return result

    def _rehearsed(
        self, call: RecordedCall, given: Any, into: _Waiting | None
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Make a call on scratch memory: the result, and the state of the generator afterwards."""
        target = short_lived(0 if into is None else into.recipe.nbytes)

        def scratch(tensor: torch.Tensor) -> torch.Tensor:
            found = self._of(tensor)
            if found is None:
                return tensor
            memory = target if found is into else short_lived(found.recipe.nbytes)
            return View.of(tensor).within(memory)

        args, kwargs = with_tensors(given, scratch)
        before = torch.get_rng_state()
        try:
            if call.state is not None:
                torch.set_rng_state(call.state)
            with torch.no_grad():
                return call.function(*args, **kwargs), torch.get_rng_state()
        finally:
            torch.set_rng_state(before)

    def _without_values(
        self, result: torch.Tensor, call: RecordedCall, length: int
    ) -> torch.Tensor:
        """A tensor like the result of a call, in memory that waits for values."""
        memory, view = self._room_for(result)
        recipe = Recipe(memory.numel())
        if not _name(call.function).startswith(("empty", "new_empty")):
            recipe = recipe.then(replace(call, target=view), length)
        storage = memory.untyped_storage()
        self._waiting[address_of(storage)] = _Waiting(memory, holders_of(storage), recipe)
        return view.within(memory)

    def _kept(self, into: _Waiting | None, tensor: torch.Tensor) -> torch.Tensor | Reference:
        """What a recipe keeps of an argument, which the script may change later."""
        found = self._of(tensor)
        if found is None:
            return tensor.detach().clone()
        return Reference(View.of(tensor), None if found is into else found.recipe)

    def _can_be_kept(self, tensor: torch.Tensor) -> bool:
        """Whether a recipe can refer to a tensor, or hold a copy."""
        if tensor.layout != torch.strided:
            return False
        small = tensor.device.type == "cpu" and tensor.nbytes <= _SMALL_BYTES
        return tensor.is_meta or small or self._of(tensor) is not None

    def _in_file(self, result: torch.Tensor) -> torch.Tensor:
        """Have a large copy of values lie in a file, as the values do."""
        with hidden_from_modes():
            if not self._is_large(result):
                return result
            memory, view = self._room_for(result)
            self._allocator.provide(memory)
            return view.within(memory).copy_(result)

    def _room_for(self, tensor: torch.Tensor) -> tuple[torch.Tensor, View]:
        """(bytes,) uint8 without room for a tensor alone, and where it lies in that."""
        start, stop = extent(tensor)
        return self._allocator.room(stop - start), View.of(tensor)._replace(offset=0)

    def _is_large(self, result: Any) -> bool:
        """Whether a result is a tensor that may do without values."""
        ordinary = type(result) is torch.Tensor and result.layout == torch.strided
        return ordinary and result.device.type == "cpu" and result.nbytes >= self._least_bytes

    def _of(self, tensor: torch.Tensor) -> _Waiting | None:
        """The memory without values that a tensor lies in, if it does."""
        is_plain = tensor.device.type == "cpu" and tensor.layout == torch.strided
        if not self._waiting or not is_plain or is_lazy(tensor):
            return None
        return self._waiting.get(address_of(tensor.untyped_storage()))

    def _draw(self, tensor: torch.Tensor) -> None:
        """Give a tensor its values, if it has none."""
        with hidden_from_modes():
            waiting = self._of(tensor)
            if waiting is not None:
                self._allocator.provide(waiting.memory)
                waiting.recipe.fill(waiting.memory)
                self._forget(waiting)

    def _forget(self, waiting: _Waiting) -> None:
        del self._waiting[address_of(waiting.memory.untyped_storage())]


def _name(func: Any) -> str:
    """The name of an operation without its overload."""
    return str(getattr(func, "overloadpacket", func).__name__)


def _is_known(func: Any) -> bool:
    """Whether an operation of PyTorch's can be recorded."""
    # What writes to anything but its first argument has another name.
    writes = writes_to_arguments(func) and not _name(func).endswith("_")
    return not writes and (Tag.pointwise in func.tags or _name(func) in _KNOWN)


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
