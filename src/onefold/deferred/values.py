"""Parameters whose first values nobody has drawn yet, and the calls that make these values.

`onefold.build` makes such parameters.

Note: who draws them
--------------------
A Trainer has the values drawn where they are kept, a parameter at a time. Whoever else computes
with such a parameter has it drawn then, in the file that its memory is a part of: a parameter that
has no values yet says when it is used, as one does that is elsewhere.

Note: why the bits are the same
-------------------------------
A recipe repeats the operations of the script, each on memory of the same strides, from the state
that the generator had, with the same default dtype and number of threads. A recipe never changes:
an operation on the tensor makes a new one, so a recipe that a copy has taken over stays as it was.
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
    """Where a tensor lies in memory that it may share with others."""

    dtype: torch.dtype
    shape: tuple[int, ...]
    stride: tuple[int, ...]
    offset: int
    """Of its first element, counted in elements of its dtype."""

    @classmethod
    def of(cls, tensor: torch.Tensor) -> View:
        """Where a tensor lies in its storage."""
        shape, stride = tuple(tensor.shape), tuple(tensor.stride())
        return cls(tensor.dtype, shape, stride, int(tensor.storage_offset()))

    def within(self, memory: torch.Tensor) -> torch.Tensor:
        """The tensor that lies there in (bytes,) uint8 memory."""
        begins = int(memory.storage_offset()) // self.dtype.itemsize
        empty = torch.empty(0, dtype=self.dtype, device=memory.device)
        return empty.set_(memory.untyped_storage(), begins + self.offset, self.shape, self.stride)


@dataclass(frozen=True, slots=True)
class Reference:
    """Stands for a tensor among the arguments of a call."""

    view: View
    recipe: Recipe | None = None
    """Of the memory that it lies in; None if that is the memory that is being filled."""

    def tensor(self, memory: torch.Tensor) -> torch.Tensor:
        """The tensor itself."""
        return self.view.within(memory if self.recipe is None else self.recipe.made())


@dataclass(frozen=True, slots=True, kw_only=True)
class RecordedCall:
    """One operation, and what its result depends on besides its arguments."""

    function: Callable[..., Any]
    args: Sequence[Any]
    kwargs: Mapping[str, Any]
    state: torch.Tensor | None
    """Of the generator that it draws from; None if it draws nothing."""
    target: View | None = None
    """Where its result goes; None if it writes to one of its arguments."""
    default_dtype: torch.dtype = field(default_factory=torch.get_default_dtype)
    threads: int = field(default_factory=torch.get_num_threads)
    """Of one operation."""

    def repeat(self, memory: torch.Tensor) -> None:
        """Make the call again, on (bytes,) uint8 of other memory."""
        given = (tuple(self.args), dict(self.kwargs))
        args, kwargs = with_tensors(given, lambda each: each.tensor(memory), Reference)
        dtype, threads = torch.get_default_dtype(), torch.get_num_threads()
        if self.state is not None:
            torch.set_rng_state(self.state)
        torch.set_default_dtype(self.default_dtype)
        torch.set_num_threads(self.threads)
        try:
            # The script may have set another default device since.
            with torch.no_grad(), torch.device("cpu"):
                result = self.function(*args, **kwargs)
        finally:
            torch.set_default_dtype(dtype)
            torch.set_num_threads(threads)
        if self.target is not None:
            self.target.within(memory).copy_(result)


@dataclass(frozen=True, slots=True)
class Recipe:
    """All calls that have made the content of a stretch of memory, in their order."""

    nbytes: int
    calls: tuple[RecordedCall, ...] = ()
    length: int = 0
    """How many calls it takes, those that make arguments included."""

    def then(self, call: RecordedCall, length: int) -> Recipe:
        """The recipe with one more call, and of another length."""
        return Recipe(self.nbytes, (*self.calls, call), length)

    def made(self) -> torch.Tensor:
        """(nbytes,) uint8 of these values, zeros where no call has made any."""
        memory = short_lived(self.nbytes)
        self.fill(memory)
        return memory

    def fill(self, memory: torch.Tensor) -> None:
        """Make the values in (nbytes,) uint8 of memory on the host; generators stay as they are."""
        state = torch.get_rng_state()
        try:
            for call in self.calls:
                call.repeat(memory)
        finally:
            torch.set_rng_state(state)


def short_lived(nbytes: int) -> torch.Tensor:
    """(nbytes,) uint8 of zeros on the host, returned to the system as soon as freed."""
    # The C library may keep what it is given back, and put something small and lasting into it.
    return torch.frombuffer(mmap.mmap(-1, max(nbytes, 1)), dtype=torch.uint8)[:nbytes]


_ABOUT_MEMORY = frozenset(
    [
        *(torch.Tensor.stride, torch.Tensor.is_contiguous, torch.Tensor.storage_offset),
        # Some optimizers make their state of such as soon as they are made.
        *(torch.empty_like, torch.zeros_like, torch.ones_like, torch.full_like),
    ]
)
"""What asks a parameter for its shape and its place alone, both of which it has."""


@dataclass(frozen=True, slots=True)
class DeferredValues:
    """The values of one parameter, which has its memory to itself."""

    recipe: Recipe
    view: View
    """How the parameter lies in the memory."""
    memory: torch.Tensor
    """(bytes,) uint8 of the allocator's, without room on the disk."""
    allocator: SparseAllocator

    def write_to(self, view: torch.Tensor) -> None:
        """Draw the values, into a tensor of the parameter's shape, on any device, of any dtype."""
        alike = (view.dtype, view.device.type) == (self.view.dtype, "cpu")
        if alike and tuple(view.stride()) == self.view.stride:
            self.recipe.fill(storage_order(view).view(torch.uint8))
        else:
            view.copy_(self.view.within(self.recipe.made()))

    def settle(self) -> None:
        """Draw the values, into the parameter's own memory.

        Raises:
            OSError: the disk has no room.
        """
        self.allocator.provide(self.memory)
        # Whoever is asking may be in a mode in which nothing can be drawn: these are a thread's.
        with ThreadPoolExecutor(1) as alone:
            alone.submit(self.recipe.fill, self.memory).result()


def defer(parameter: torch.nn.Parameter, values: DeferredValues) -> None:
    """Have a parameter's values be drawn when somebody needs them."""
    setattr(parameter, DEFERRED, values)
    _PARAMETERS.hide([parameter])


@contextmanager
def revealed(parameters: Iterable[torch.nn.Parameter]) -> Iterator[None]:
    """Have parameters be plain ones, but after an error those that still have no values.

    Their memory is another one then, or has its values.
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
            # Plain first: drawing is a use as well.
            assert isinstance(tensor, torch.nn.Parameter)
            with revealed([tensor]):
                values.settle()


_PARAMETERS = AccessHook(
    _settle,
    harmless=_ABOUT_MEMORY,
    uses=[
        torch.Tensor.data_ptr,
        # What is put in the place of the values must not be taken for ours any more.
        torch.Tensor.data.__set__,  # type: ignore[attr-defined]
    ],
)
