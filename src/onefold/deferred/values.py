"""Parameters whose initial values are not drawn yet, and the calls that draw them.

`onefold.build` makes such parameters.

Note: when values are drawn
---------------------------
A Trainer draws the values directly into the memory that will hold them, one parameter at a time. If
other code reads such a parameter, its values are drawn at that moment, in the file that backs its
memory: a hook intercepts its use, as for a parameter that is partitioned.

Note: why the bits are the same
-------------------------------
A recipe repeats the operations of the script, each on memory of the same strides, from the same
state of the generator, with the same default dtype and number of threads. A recipe is immutable: an
operation on the tensor makes a new recipe, so a recipe that a copy has taken over does not change.
"""

from __future__ import annotations

import mmap
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch

from onefold.core.flat import storage_order
from onefold.core.structure import with_tensors
from onefold.deferred.access import DEFERRED, AccessHook, deferred_of
from onefold.system.file_memory import SparseAllocator

__all__ = [
    "DeferredValues",
    "Recipe",
    "RecordedCall",
    "Reference",
    "View",
    "defer",
    "revealed",
    "short_lived",
]


class View(NamedTuple):
    """Location of a tensor in memory that it may share with others."""

    dtype: torch.dtype
    shape: tuple[int, ...]
    stride: tuple[int, ...]
    offset: int
    """Offset of its first element, in elements of its dtype."""

    @classmethod
    def of(cls, tensor: torch.Tensor) -> View:
        """Return the location of a tensor in its storage."""
        shape, stride = tuple(tensor.shape), tuple(tensor.stride())
        return cls(tensor.dtype, shape, stride, int(tensor.storage_offset()))

    def within(self, memory: torch.Tensor) -> torch.Tensor:
        """Return the tensor at this location in (bytes,) uint8 memory."""
        begins = int(memory.storage_offset()) // self.dtype.itemsize
        empty = torch.empty(0, dtype=self.dtype, device=memory.device)
        return empty.set_(memory.untyped_storage(), begins + self.offset, self.shape, self.stride)


@dataclass(frozen=True, slots=True)
class Reference:
    """Placeholder for a tensor among the arguments of a call."""

    view: View
    recipe: Recipe | None = None
    """Recipe of the memory that contains the tensor; None for the memory being filled."""

    def tensor(self, memory: torch.Tensor) -> torch.Tensor:
        """Return the tensor itself."""
        return self.view.within(memory if self.recipe is None else self.recipe.made())


@dataclass(frozen=True, slots=True, kw_only=True)
class RecordedCall:
    """One operation, and everything besides its arguments that affects its result."""

    function: Callable[..., Any]
    args: Sequence[Any]
    kwargs: Mapping[str, Any]
    state: torch.Tensor | None
    """State of the generator before the call; None if the call draws nothing."""
    target: View | None = None
    """Location of its result; None if it writes to one of its arguments."""
    default_dtype: torch.dtype = field(default_factory=torch.get_default_dtype)
    threads: int = field(default_factory=torch.get_num_threads)
    """Number of threads of one operation."""

    def repeat(self, memory: torch.Tensor) -> None:
        """Repeat the call on (bytes,) uint8 of other memory."""
        given = (tuple(self.args), dict(self.kwargs))
        args, kwargs = with_tensors(given, lambda each: each.tensor(memory), Reference)
        dtype, threads = torch.get_default_dtype(), torch.get_num_threads()
        if self.state is not None:
            torch.set_rng_state(self.state)
        torch.set_default_dtype(self.default_dtype)
        torch.set_num_threads(self.threads)
        try:
            # The script may have set another default device in the meantime.
            with torch.no_grad(), torch.device("cpu"):
                result = self.function(*args, **kwargs)
        finally:
            torch.set_default_dtype(dtype)
            torch.set_num_threads(threads)
        if self.target is not None:
            self.target.within(memory).copy_(result)


@dataclass(frozen=True, slots=True)
class Recipe:
    """All calls that made the content of a block of memory, in order."""

    nbytes: int
    calls: tuple[RecordedCall, ...] = ()
    length: int = 0
    """Number of calls to run, including those that make arguments."""

    def then(self, call: RecordedCall, length: int) -> Recipe:
        """Return the recipe with one more call, and another length."""
        return Recipe(self.nbytes, (*self.calls, call), length)

    def made(self) -> torch.Tensor:
        """Return (nbytes,) uint8 with these values, zero where no call wrote."""
        memory = short_lived(self.nbytes)
        self.fill(memory)
        return memory

    def fill(self, memory: torch.Tensor) -> None:
        """Draw the values into (nbytes,) uint8 of host memory; generators keep their states."""
        state = torch.get_rng_state()
        try:
            for call in self.calls:
                call.repeat(memory)
        finally:
            torch.set_rng_state(state)


def short_lived(nbytes: int) -> torch.Tensor:
    """Return (nbytes,) uint8 of zeros on the host, returned to the system when freed."""
    # The C library may keep freed memory, and put a small, long-lived object into it.
    return torch.frombuffer(mmap.mmap(-1, max(nbytes, 1)), dtype=torch.uint8)[:nbytes]


_ABOUT_MEMORY = frozenset(
    [
        *(torch.Tensor.stride, torch.Tensor.is_contiguous, torch.Tensor.storage_offset),
        # Some optimizers create their state from these on construction.
        *(torch.empty_like, torch.zeros_like, torch.ones_like, torch.full_like),
    ]
)
"""Functions that read only a parameter's shape and location, which exist without values."""


@dataclass(frozen=True, slots=True)
class DeferredValues:
    """The values of one parameter, which does not share its memory."""

    recipe: Recipe
    view: View
    """Location of the parameter in the memory."""
    memory: torch.Tensor
    """(bytes,) uint8 from the allocator, without disk space."""
    allocator: SparseAllocator

    def write_to(self, view: torch.Tensor) -> None:
        """Draw the values into a tensor of the parameter's shape, on any device, in any dtype."""
        alike = (view.dtype, view.device.type) == (self.view.dtype, "cpu")
        if alike and tuple(view.stride()) == self.view.stride:
            self.recipe.fill(storage_order(view).view(torch.uint8))
        else:
            view.copy_(self.view.within(self.recipe.made()))

    def settle(self) -> None:
        """Draw the values into the parameter's own memory.

        Raises:
            OSError: the disk is full.
        """
        self.allocator.provide(self.memory)
        # The caller may be in a mode that forbids drawing; a new thread has no modes.
        with ThreadPoolExecutor(1) as alone:
            alone.submit(self.recipe.fill, self.memory).result()


def defer(parameter: torch.nn.Parameter, values: DeferredValues) -> None:
    """Defer drawing a parameter's values until they are used."""
    setattr(parameter, DEFERRED, values)
    _PARAMETERS.hide([parameter])


@contextmanager
def revealed(parameters: Iterable[torch.nn.Parameter]) -> Iterator[None]:
    """Make parameters plain inside this context; after an error, defer those without values again.

    A parameter whose memory was replaced has values.
    """
    waiting = [(each, values) for each in parameters if (values := deferred_of(each)) is not None]
    for parameter, _ in waiting:
        _PARAMETERS.show([parameter])
        delattr(parameter, DEFERRED)
    try:
        yield
    except BaseException:
        for parameter, values in waiting:
            if parameter.data_ptr() == values.memory.data_ptr():
                defer(parameter, values)
        raise


def _settle(tensors: Sequence[torch.Tensor]) -> None:
    for tensor in tensors:
        values = deferred_of(tensor)
        if values is not None:
            # Make the parameter plain first, because drawing is a use as well.
            assert isinstance(tensor, torch.nn.Parameter)
            with revealed([tensor]):
                values.settle()


_PARAMETERS = AccessHook(
    _settle,
    harmless=_ABOUT_MEMORY,
    uses=[
        torch.Tensor.data_ptr,
        # Assigning `.data` replaces the values, so the parameter must no longer be deferred.
        torch.Tensor.data.__set__,  # type: ignore[attr-defined]
    ],
)
