"""How the values of a tensor come about, written down so that they can be made later. Pure.

Note: why the bits are the same
-------------------------------
A recipe repeats the very calls that a script has made, each on memory of the same strides, from the
state that the generator had then, with the same default dtype and number of threads. It is never
changed once it is made: what is done to the tensor later becomes another recipe, so one that was
taken over by a copy stays what it was.
"""

from __future__ import annotations

import mmap
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch

from onefold.core.flat import storage_order
from onefold.core.structure import parts_of, with_parts

__all__ = ["Around", "Generation", "Made", "Recipe", "Reference", "View", "replaced", "short_lived"]


class View(NamedTuple):
    """Where a tensor lies in memory that others may lie in as well."""

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

    def on_meta(self) -> torch.Tensor:
        """A tensor of this form without memory."""
        return torch.empty_strided(self.shape, self.stride, dtype=self.dtype, device="meta")

    def within(self, memory: torch.Tensor) -> torch.Tensor:
        """The tensor that lies there in (bytes,) uint8 memory."""
        begins = int(memory.storage_offset()) // self.dtype.itemsize
        empty = torch.empty(0, dtype=self.dtype, device=memory.device)
        return empty.set_(memory.untyped_storage(), begins + self.offset, self.shape, self.stride)


@dataclass(frozen=True, slots=True, kw_only=True)
class Around:
    """What the result of a call depends on beside its arguments."""

    state: torch.Tensor | None
    """The state of PyTorch's generator for the processor, if the call draws from it."""
    default_dtype: torch.dtype
    threads: int
    """Of one operation."""

    @classmethod
    def now(cls) -> Around:
        """What a call that is made now depends on."""
        return cls(
            state=torch.get_rng_state(),
            default_dtype=torch.get_default_dtype(),
            threads=torch.get_num_threads(),
        )

    @contextmanager
    def again(self) -> Iterator[None]:
        """Surround the call when it is made once more; all is put back but the generator."""
        dtype, threads = torch.get_default_dtype(), torch.get_num_threads()
        if self.state is not None:
            torch.set_rng_state(self.state)
        torch.set_default_dtype(self.default_dtype)
        torch.set_num_threads(self.threads)
        try:
            # Whatever the script has set since: what is made elsewhere is not noted.
            with torch.device("cpu"):
                yield
        finally:
            torch.set_default_dtype(dtype)
            torch.set_num_threads(threads)


@dataclass(frozen=True, slots=True)
class Generation:
    """Stands for a generator of the script's among the arguments of a call."""

    state: torch.Tensor

    def generator(self) -> torch.Generator:
        """A generator that draws what that one drew."""
        generator = torch.Generator()
        generator.set_state(self.state)
        return generator


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
class Made:
    """One call."""

    function: Callable[..., Any]
    args: Sequence[Any]
    kwargs: Mapping[str, Any]
    around: Around
    target: View | None = None
    """Where its result goes; None if it writes into one of its arguments."""

    def repeat(self, memory: torch.Tensor) -> None:
        """Make the call once more, on other memory."""
        args, kwargs = replaced(
            (tuple(self.args), dict(self.kwargs)),
            Reference | Generation,
            lambda each: each.tensor(memory) if isinstance(each, Reference) else each.generator(),
        )
        with self.around.again():
            result = self.function(*args, **kwargs)
        if self.target is not None:
            self.target.within(memory).copy_(result)


@dataclass(frozen=True, slots=True)
class Recipe:
    """All calls that have made what lies in a stretch of memory, in their order."""

    nbytes: int
    calls: tuple[Made, ...] = ()

    def then(self, call: Made) -> Recipe:
        """The recipe with one more call."""
        return Recipe(self.nbytes, (*self.calls, call))

    def made(self) -> torch.Tensor:
        """(nbytes,) uint8 of these values, of any content where there are none."""
        memory = short_lived(self.nbytes)
        self.fill(memory)
        return memory

    def fill(self, memory: torch.Tensor) -> None:
        """Make the values in (nbytes,) uint8 of memory on the host; generators stay as they are."""
        state = torch.get_rng_state()
        try:
            with torch.no_grad():
                for call in self.calls:
                    call.repeat(memory)
        finally:
            torch.set_rng_state(state)

    def fill_view(self, view: torch.Tensor, made: View) -> None:
        """Make the values of a tensor that has all of the memory to itself.

        Args:
            view: where they are to be, of the same shape, on any device and in any dtype.
            made: how the tensor lies in the memory.
        """
        alike = (view.dtype, view.device.type) == (made.dtype, "cpu")
        if alike and tuple(view.stride()) == made.stride:
            self.fill(storage_order(view).view(torch.uint8))
        else:
            view.copy_(made.within(self.made()))


def short_lived(nbytes: int) -> torch.Tensor:
    """(nbytes,) uint8 of zeros on the host, which the system has back as soon as they are gone."""
    # The C library may keep what it is given back, and put something small and lasting into it.
    return torch.frombuffer(mmap.mmap(-1, max(nbytes, 1)), dtype=torch.uint8)[:nbytes]


def replaced(value: Any, kind: Any, change: Callable[[Any], Any]) -> Any:
    """Make the same containers with other things in the place of all of a kind."""
    if isinstance(value, kind):
        return change(value)
    parts = parts_of(value)
    if not parts:
        return value
    return with_parts(value, [replaced(part, kind, change) for _, part in parts])
