"""Parameters whose first values nobody has drawn yet: `onefold.build` knows how to.

Note: who draws them
--------------------
A Trainer has the values drawn where they are kept, a parameter at a time. Whoever else computes
with such a parameter has it drawn then, in the file that its memory is a part of: a parameter that
has no values yet says when it is used, as one does that is elsewhere.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass

import torch

from onefold.core.flat import storage_order
from onefold.deferred.access import DEFERRED, AccessHook, deferred_of
from onefold.deferred.recipe import Recipe, View
from onefold.system.file_memory import SparseAllocator

__all__ = ["DeferredValues", "defer", "revealed"]

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
