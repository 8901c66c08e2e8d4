"""Notes how the tensors of a model come about, and leaves the large ones without values.

`build` makes a model in that way.

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
from types import FunctionType
from typing import Any, ParamSpec, TypeVar

import torch
from torch.nn.parameter import is_lazy
from torch.overrides import TorchFunctionMode

from onefold.core.flat import extent
from onefold.core.recipe import Around, Generation, Made, Recipe, Reference, View, replaced
from onefold.core.structure import parts_of
from onefold.engine.firstvalues import Undrawn, put_off
from onefold.engine.lentparameter import is_harmless
from onefold.run.calls import (
    ABOUT,
    ADDRESSES,
    DRAWING,
    EMPTY,
    FILLING,
    INIT,
    LIKE,
    MAKING,
    OF_LISTS,
    can_be_copied,
    can_be_kept,
    first_of,
    generators,
    has_a_graph,
    is_of,
    is_own,
    is_possible,
    reads_all,
    takes_a_view,
    tensors_in,
)
from onefold.run.world import current_world
from onefold.system.compat import asking_for_truncated_normal, holders_of
from onefold.system.heap import BareMemory, home_of

__all__ = ["LEAST_BYTES", "build"]


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
        heap: where they lie, in files if they are drawn after all.
        least_bytes: smaller tensors are ordinary.
    """

    def __init__(self, heap: BareMemory, least_bytes: int) -> None:
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
            func = INIT.get(func.__name__, func)
        waiting = [each for each in tensors_in((args, given)) if self._of(each) is not None]
        if waiting:
            return self._of_waiting(func, args, given, waiting)
        if func not in MAKING:
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
        is_about = (is_harmless(func) and func not in ADDRESSES) or func in ABOUT
        if is_about or takes_a_view(func, args, kwargs):
            return func(*args, **kwargs)
        if self._can_note(func, args, kwargs, waiting):
            is_first = first_of(args, kwargs) is waiting[0]
            if is_first and func in FILLING and self._filled(func, args, kwargs, waiting[0]):
                return None if func is torch.Tensor.__setitem__ else waiting[0]
            if reads_all(func, args, kwargs):
                noted = self._derived(func, args, kwargs)
                if noted is not None:
                    return noted
        for tensor in waiting:
            self._draw_that_of(tensor)
        return self._in_file(func, args, kwargs, func(*args, **kwargs))

    def _filled(
        self,
        func: Callable[..., Any],
        args: Sequence[Any],
        kwargs: dict[str, Any],
        target: torch.Tensor,
    ) -> bool:
        """Note a call that writes to its first argument; return whether that is possible."""
        into = self._of(target)
        assert into is not None
        around = Around.now()
        if func not in DRAWING:
            around = replace(around, state=None)
        noted = self._noted((tuple(args), kwargs), into)
        if func in DRAWING:
            # For the generator's sake, where each tensor lies as it does.
            scratch = Recipe(into.recipe.nbytes).made()
            rehearsed = replaced(noted, Reference, lambda each: each.tensor(scratch))
            given = iter(generators(args, kwargs))
            rehearsed = replaced(rehearsed, Generation, lambda _: next(given))
            with torch.no_grad():
                func(*rehearsed[0], **rehearsed[1])
        elif not is_possible(func, noted):
            return False
        call = Made(function=func, args=noted[0], kwargs=noted[1], around=around)
        into.recipe = into.recipe.then(call)
        return True

    def _derived(
        self, func: Callable[..., Any], args: Sequence[Any], kwargs: dict[str, Any]
    ) -> torch.Tensor | None:
        """Note a call that makes a tensor of others; None if that is not possible."""
        around = Around.now()
        noted = self._noted((tuple(args), kwargs), None, read=func not in LIKE)
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
        if is_of(result, rehearsed):
            # A conversion that has nothing to do: it returns what it was given.
            return func(*args, **kwargs)  # type: ignore[no-any-return]
        return self._put_off(None if func in EMPTY else func, noted, around, result)

    def _made(self, func: Callable[..., Any], args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
        """Make a call that makes a tensor, of which no argument waits for values."""
        around = Around.now()
        noted = None
        if func not in OF_LISTS and self._can_note(func, args, kwargs, ()):
            noted = self._noted((tuple(args), kwargs), None)
        result = func(*args, **kwargs)
        large = isinstance(result, torch.Tensor) and self._is_large(result)
        if noted is None or not large or is_of(result, (args, kwargs)):
            return self._in_file(func, args, kwargs, result)
        return self._put_off(None if func in EMPTY else func, noted, around, result)

    def _put_off(
        self,
        func: Callable[..., Any] | None,
        noted: tuple[Any, Any],
        around: Around,
        result: torch.Tensor,
    ) -> torch.Tensor:
        """Note how a tensor was made, and let its values go; those of None are of no matter."""
        memory, view = self._room_for(result)
        recipe = Recipe(memory.numel())
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
        self,
        func: Callable[..., Any],
        args: Sequence[Any],
        kwargs: Mapping[str, Any],
        waiting: Sequence[torch.Tensor],
    ) -> bool:
        """Whether all arguments can be kept for a second call."""
        every = list(tensors_in((args, kwargs)))
        if kwargs.get("out") is not None or (has_a_graph(every) and not is_own(func)):
            return False
        but = set(map(id, waiting))
        others = [each for each in every if id(each) not in but]
        return all(map(can_be_copied, others)) and can_be_kept((args, kwargs))

    def _in_file(
        self, func: Callable[..., Any], args: Sequence[Any], kwargs: Mapping[str, Any], result: Any
    ) -> Any:
        """Have a large tensor with values lie in a file, if this call has made it."""
        is_large = isinstance(result, torch.Tensor) and self._is_large(result)
        if is_large and func in MAKING and not is_of(result, (args, kwargs)):
            memory, view = self._room_for(result)
            self._heap.provide(memory)
            result.data = view.within(memory).copy_(result.detach())
        return result

    def _room_for(self, tensor: torch.Tensor) -> tuple[torch.Tensor, View]:
        """(bytes,) uint8 without room for a tensor alone, and where it lies in that."""
        start, stop = extent(tensor)
        view = View(tensor.dtype, tuple(tensor.shape), tuple(tensor.stride()), 0)
        return self._heap.room(stop - start), view

    def _is_large(self, tensor: torch.Tensor) -> bool:
        ordinary = tensor.device.type == "cpu" and tensor.layout == torch.strided
        return ordinary and type(tensor) is torch.Tensor and tensor.nbytes >= self._least_bytes

    def _of(self, tensor: torch.Tensor) -> _Waiting | None:
        """The memory without values that a tensor lies in, if it does."""
        is_plain = tensor.device.type == "cpu" and tensor.layout == torch.strided
        if not self._waiting or not is_plain or is_lazy(tensor):
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


def _known(state: torch.Tensor | None) -> torch.Tensor:
    assert state is not None
    return state


Given = ParamSpec("Given")
Model = TypeVar("Model")

LEAST_BYTES = 4096
"""Smaller tensors have their values at once."""


def build(make: Callable[Given, Model], *args: Given.args, **kwargs: Given.kwargs) -> Model:
    """Make a model without its values, where devices keep less than all of them.

    With ``--keep span``, ``host`` and ``stages`` PyTorch's functions that make and fill tensors
    (``empty``, ``randn``, ``normal_``, those of ``torch.nn.init`` and the like) note what they
    would do, and the Trainer has it done where each value is kept, a parameter at a time. What
    computes with a parameter before that, also after this call, gets its values: then it lies in a
    file, of which the system keeps in memory what there is room for. The bits are those of
    ``make(*args, **kwargs)``, which this is with ``--keep all``, and random numbers go on as they
    do after that. `onefold plan` needs no values at all.

    Args:
        make: the class of a model, or a function that makes one, several in a list or a dict, or a
            model and what belongs to it.
        args: its arguments.
        kwargs: its arguments with names.

    Raises:
        OSError: there is no room for the file; ``--home`` names the folder in which it is.

    >>> onefold.build(torch.nn.Linear, 3, 2).weight.shape
    torch.Size([2, 3])
    """
    options = current_world().options
    # A plan looks at sizes alone, perhaps at those of a model that fits nowhere.
    if options.keep == "all" and not options.plan:
        return make(*args, **kwargs)
    recording = Recording(BareMemory(home_of(options.home)), LEAST_BYTES)
    try:
        with recording.noting():
            made = make(*args, **kwargs)
    except BaseException:
        # A script may have kept some of it.
        recording.draw_all()
        raise
    recording.finish(made)
    return made
