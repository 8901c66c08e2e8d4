"""Records how the tensors of a model are made, and leaves the large ones without values.

`build` makes a model in this way. `Recording` intercepts each operation at PyTorch's dispatcher,
where all functions become a few operations that make, fill and view tensors:

- An operation that makes a tensor (``empty``, ``randn``, ``mul``) gives a large one memory without
  disk space, and a recipe: the calls that make its values.
- An operation that fills such a tensor (``normal_``, ``copy_``, ``mul_``) is added to its recipe.
- A view shares the memory of its tensor, and therefore its recipe.
- Any other operation needs values: its tensors are drawn before it runs, each in a file.

Note: random numbers during recording
-------------------------------------
Later draws, by a dropout layer or the script, must find the generator in the same state as without
recording. So each recorded operation also runs immediately, on scratch memory that is then freed.
This advances the generator, gives the shape of the result, and finds errors. When values are
needed, the operation runs again, from the recorded state of the generator.

Note: functions that bypass the dispatcher
------------------------------------------
Some methods (``numpy``, ``tolist``, ``data_ptr``) read memory without an operation. `_DirectReads`
intercepts them as functions, and draws first. ``trunc_normal_`` reads its draws to decide what to
draw again. It is recorded as one operation, because otherwise every model that uses it would be
drawn.

Note: other tensors in the same memory
--------------------------------------
At the end only parameters of the model stay without values, and of these only the ones that share
their memory with no other tensor, because no hook would intercept reads of the other one. For the
same reason, operations with an autograd graph are not recorded.
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
"""Maximum size of a tensor with values that is copied into a recipe."""
_LONGEST = 250
"""Maximum calls in a recipe: repeating more takes too long, so values are drawn at once."""
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
"""Operations to record in addition to pointwise ones; their control flow ignores values."""
_T = torch.Tensor
_DIRECT_READS = frozenset(
    [
        *(_T.numpy, _T.tolist, _T.data_ptr, _T.untyped_storage, _T.storage, _T.share_memory_),
        *(_T.apply_, _T.map_, _T.map2_, _T.__array__, _T.__dlpack__, _T.__reduce_ex__),
        *(_T.__deepcopy__, _T.__repr__, _T.__format__, _T.new_tensor),
        *(torch.tensor, torch.as_tensor, torch.asarray),
    ]
)
"""Functions that read memory without an operation, or with one that no mode intercepts."""


@dataclass(slots=True)
class _Waiting:
    """Memory without values."""

    memory: torch.Tensor
    """(bytes,) uint8."""
    holders: int
    """Number of tensors that used the storage before the script did."""
    recipe: Recipe

    @property
    def users(self) -> int:
        """Number of the script's tensors that use it."""
        return holders_of(self.memory.untyped_storage()) - self.holders

    def is_filled_by(self, tensor: torch.Tensor) -> bool:
        """Return whether a tensor in it occupies all of it."""
        return tensor.nbytes == self.recipe.nbytes and is_dense(tensor.shape, tensor.stride())


class _DirectReads(TorchFunctionMode):
    """Draws values before a function reads them without the dispatcher."""

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
    """Makes large tensors without values if PyTorch's operations allow it.

    Args:
        allocator: allocator of their memory, in files if values are drawn after all.
        least_bytes: minimum size; smaller tensors are ordinary.
    """

    supports_higher_order_operators = True

    def __init__(self, allocator: SparseAllocator, least_bytes: int) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._allocator, self._least_bytes = allocator, least_bytes
        self._waiting: dict[int, _Waiting] = {}
        """Memory without values, by the address of its storage."""

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
        """Defer the parameters of the modules in ``made``, and draw all other values."""
        gc.collect()  # frees views in reference cycles
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
        """Draw all missing values that are still in use."""
        for waiting in list(self._waiting.values()):
            if waiting.users:
                self._draw(waiting.memory)
        self._waiting.clear()

    def _truncated(self, draw: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        """Record a call of the function that draws for ``trunc_normal_``."""
        result = self._recorded(draw, args, kwargs, fills=True, draws=True)
        return draw(*args, **kwargs) if result is None else result

    def _recorded(
        self, func: Any, args: Sequence[Any], kwargs: dict[str, Any], *, fills: bool, draws: bool
    ) -> torch.Tensor | None:
        """Record an operation and return its result; None if it needs values.

        Args:
            func: the operation.
            args: positional arguments.
            kwargs: keyword arguments.
            fills: whether it writes to its first argument.
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
            # The call will draw from PyTorch's default generator, set to the script's generator
            # state.
            generator = kwargs.get("generator") or torch.default_generator
            given = tuple(args), {n: None if v is generator else v for n, v in kwargs.items()}
            kept = with_tensors(given, partial(self._kept, into))
            state = generator.get_state() if draws else None
            call = RecordedCall(function=func, args=kept[0], kwargs=kept[1], state=state)
            try:
                result, after = self._rehearsed(call, given, into)
            except Exception:
                # PyTorch reports the error when the call is made with values.
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
        """Run a call on scratch memory; return the result, and the generator's state afterwards."""
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
        """Return a tensor like the result of a call, in memory without values."""
        memory, view = self._room_for(result)
        recipe = Recipe(memory.numel())
        if not _name(call.function).startswith(("empty", "new_empty")):
            recipe = recipe.then(replace(call, target=view), length)
        storage = memory.untyped_storage()
        self._waiting[address_of(storage)] = _Waiting(memory, holders_of(storage), recipe)
        return view.within(memory)

    def _kept(self, into: _Waiting | None, tensor: torch.Tensor) -> torch.Tensor | Reference:
        """Convert an argument for a recipe, because the script may change it later."""
        found = self._of(tensor)
        if found is None:
            return tensor.detach().clone()
        return Reference(View.of(tensor), None if found is into else found.recipe)

    def _can_be_kept(self, tensor: torch.Tensor) -> bool:
        """Return whether a recipe can refer to a tensor, or hold a copy."""
        if tensor.layout != torch.strided:
            return False
        small = tensor.device.type == "cpu" and tensor.nbytes <= _SMALL_BYTES
        return tensor.is_meta or small or self._of(tensor) is not None

    def _in_file(self, result: torch.Tensor) -> torch.Tensor:
        """Move a large copy of values to a file, where the original values are."""
        with hidden_from_modes():
            if not self._is_large(result):
                return result
            memory, view = self._room_for(result)
            self._allocator.provide(memory)
            return view.within(memory).copy_(result)

    def _room_for(self, tensor: torch.Tensor) -> tuple[torch.Tensor, View]:
        """Allocate (bytes,) uint8 without disk space for one tensor; return it with the
        location."""
        start, stop = extent(tensor)
        return self._allocator.room(stop - start), View.of(tensor)._replace(offset=0)

    def _is_large(self, result: Any) -> bool:
        """Return whether a result is a tensor that may stay without values."""
        ordinary = type(result) is torch.Tensor and result.layout == torch.strided
        return ordinary and result.device.type == "cpu" and result.nbytes >= self._least_bytes

    def _of(self, tensor: torch.Tensor) -> _Waiting | None:
        """Return the memory without values that contains a tensor; None if its memory has
        values."""
        is_plain = tensor.device.type == "cpu" and tensor.layout == torch.strided
        if not self._waiting or not is_plain or is_lazy(tensor):
            return None
        return self._waiting.get(address_of(tensor.untyped_storage()))

    def _draw(self, tensor: torch.Tensor) -> None:
        """Draw the values of a tensor, if it has none."""
        with hidden_from_modes():
            waiting = self._of(tensor)
            if waiting is not None:
                self._allocator.provide(waiting.memory)
                waiting.recipe.fill(waiting.memory)
                self._forget(waiting)

    def _forget(self, waiting: _Waiting) -> None:
        del self._waiting[address_of(waiting.memory.untyped_storage())]


def _name(func: Any) -> str:
    """Return the name of an operation without its overload."""
    return str(getattr(func, "overloadpacket", func).__name__)


def _is_known(func: Any) -> bool:
    """Return whether an operation of PyTorch can be recorded."""
    # Operations that write to an argument other than the first do not end in an underscore.
    writes = writes_to_arguments(func) and not _name(func).endswith("_")
    return not writes and (Tag.pointwise in func.tags or _name(func) in _KNOWN)


def _modules_in(made: object) -> Iterator[torch.nn.Module]:
    """Yield the modules in nested containers, or the module itself."""
    if isinstance(made, torch.nn.Module):
        yield made
        return
    for _, part in parts_of(made) or ():
        yield from _modules_in(part)


def _parameters_of(module: torch.nn.Module) -> Iterable[torch.nn.Parameter]:
    """Return the parameters of a module whose use can be intercepted."""
    # A scripted module reads its parameters outside Python.
    scripted = any(isinstance(part, torch.jit.ScriptModule) for part in module.modules())
    return () if scripted else module.parameters()
