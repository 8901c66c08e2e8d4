"""Takes each shard's gradients from ``.grad``, and gives each its own memory.

Note: who owns a gradient
-------------------------
A shard starts with empty ``.grad`` fields, and its gradients are taken away before the next shard
starts. The user's code (hooks, an inner backward, ``zero_grad()``) therefore only sees its own
shard's gradients. After that onefold owns them, and the fold and the exchange add to them in place,
so no two of them may share memory. But autograd may return views of one tensor for two parameters
that go through ``torch.cat`` or a sum. A hook may return a tensor that it keeps, an expanded
tensor, or one whose strides differ from its parameter's. Such gradients are first copied into the
parameter's strides: a norm is added up in memory order, and fused optimizers read gradients in the
parameter's memory order, whatever their strides.
"""

from __future__ import annotations

import operator
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

import torch
from torch.multiprocessing.reductions import StorageWeakRef

from onefold.core.flat import extent, laid_out
from onefold.core.results import Gradients
from onefold.core.settings import added_up_in
from onefold.errors import GradientError
from onefold.system.compat import add_each

__all__ = [
    "GradientHandover",
    "ParameterSet",
    "add_gradients",
    "drop_gradients",
    "gradients_of",
    "keeping_gradients",
    "put_gradients",
    "take_gradients",
    "widened",
]


_grad = operator.attrgetter("grad")
_layout = operator.attrgetter("layout")


@dataclass(frozen=True, slots=True)
class ParameterSet:
    """Trained parameters whose gradients are taken together: all of them, or one stage."""

    parameters: Sequence[torch.nn.Parameter]
    strides: Sequence[tuple[int, ...]]
    """Strides of each parameter, which its gradient gets too."""
    names: Sequence[str]
    places: Mapping[int, int] | None = None
    """Maps a parameter's number among all to its position here; None for all parameters."""

    def some(self, numbers: Sequence[int]) -> ParameterSet:
        """Select parameters by their numbers."""
        return ParameterSet(
            [self.parameters[number] for number in numbers],
            [self.strides[number] for number in numbers],
            [self.names[number] for number in numbers],
            {number: place for place, number in enumerate(numbers)},
        )

    @property
    def numbers(self) -> Sequence[int]:
        """Each parameter's number among all parameters."""
        return range(len(self.names)) if self.places is None else list(self.places)

    def places_of(self, numbers: Sequence[int]) -> Sequence[int]:
        """Return the positions of some parameters, without parameters that are not in this set."""
        if self.places is None or not numbers:
            return numbers
        return [self.places[number] for number in numbers if number in self.places]


def gradients_of(parameters: Iterable[torch.nn.Parameter]) -> Gradients:
    """List each parameter's ``.grad``, without taking ownership."""
    return list(map(_grad, parameters))


def drop_gradients(parameters: Iterable[torch.nn.Parameter]) -> None:
    """Set every parameter's ``.grad`` to None."""
    for parameter in parameters:
        # Read first: setting .grad takes several times as long, and it is usually None already.
        if parameter.grad is not None:
            parameter.grad = None


@contextmanager
def keeping_gradients(parameters: Iterable[torch.nn.Parameter]) -> Iterator[None]:
    """Restore each parameter's ``.grad``, the script's, after its memory was changed."""
    listed = list(parameters)
    kept = gradients_of(listed)
    try:
        yield
    finally:
        put_gradients(listed, kept)


def put_gradients(parameters: Iterable[torch.nn.Parameter], gradients: Gradients) -> None:
    """Set every parameter's ``.grad``."""
    for parameter, gradient in zip(parameters, gradients, strict=True):
        # Compare first: setting .grad takes several times as long, and it usually does not change.
        if parameter.grad is not gradient:
            parameter.grad = gradient


def take_gradients(taken: ParameterSet, where: str, left_out: Sequence[int] = ()) -> Gradients:
    """Move gradients from ``.grad`` into onefold's ownership, and leave None there.

    Args:
        taken: all trained parameters, or one stage's.
        where: step and shard, for errors.
        left_out: numbers, among all parameters, of parameters whose gradients are dropped.

    Raises:
        GradientError: a gradient is sparse.
    """
    gradients = gradients_of(taken.parameters)
    for place in taken.places_of(left_out):
        gradients[place] = None
    # Clear .grad: autograd adds in place to its tensor, so the next shard's gradient would be added
    # to this one's memory.
    for parameter in taken.parameters:
        parameter.grad = None
    given = [gradient for gradient in gradients if gradient is not None]
    if set(map(_layout, given)) - {torch.strided}:
        named = zip(taken.names, gradients, strict=True)
        name = next(n for n, g in named if g is not None and g.layout is not torch.strided)
        raise GradientError(
            f"{where}: parameter {name} has a sparse gradient, but onefold requires dense "
            f"gradients. Create its layer with sparse=False"
        )
    # A quick, conservative test: gradients that share memory are views of one tensor, so either two
    # have the same address, or one does not start where its storage starts.
    starts = set(map(torch.Tensor.data_ptr, given))
    if len(starts) < len(given) or any(map(torch.Tensor.storage_offset, given)):
        gradients = _apart(gradients)
    if len(given) == len(gradients) and list(map(torch.Tensor.stride, given)) == taken.strides:
        return gradients
    pairs = zip(gradients, taken.strides, strict=True)
    return [None if g is None else laid_out(g, stride) for g, stride in pairs]


class GradientHandover:
    """Tracks the memory of gradients that a shard has sent, stage by stage.

    Autograd may return views of one tensor for parameters of several stages. An in-place addition
    to one of them must not change the other.
    """

    def __init__(self) -> None:
        self._storages: dict[int, StorageWeakRef] = {}

    def apart(self, gradients: Gradients) -> Gradients:
        """Copy gradients that share memory with gradients sent earlier."""
        result, before = list(gradients), dict(self._storages)
        for place, gradient in enumerate(gradients):
            if gradient is not None:
                storage = gradient.untyped_storage()
                earlier = before.get(storage.data_ptr())
                # An expired storage is freed, and a new one may reuse its address.
                if earlier is not None and not earlier.expired():  # type: ignore[no-untyped-call]
                    result[place] = gradient.clone()
                else:
                    self._storages[storage.data_ptr()] = StorageWeakRef(storage)  # type: ignore[no-untyped-call]
        return result


def add_gradients(left: Gradients, right: Gradients) -> Gradients:
    """Add two lists of gradients; if both have one, the sum is stored in the left one's memory.

    Raises:
        GradientError: both lists have the same tensor for a parameter.
    """
    pairs = list(zip(left, right, strict=True))
    both = [(a, b) for a, b in pairs if a is not None and b is not None]
    # A hook put its own tensor into .grad twice: adding it to itself would count it double, and the
    # left shard's values are already overwritten.
    if any(a is b for a, b in both):
        raise GradientError(
            "a hook of a parameter put the same tensor into .grad for two shards. Clone the tensor "
            "that the hook keeps, so that each shard gets its own"
        )
    if both:
        add_each([a for a, _ in both], [b for _, b in both])
    # Pass a single gradient on unchanged: adding zeros would cost a pass over memory, and turn -0
    # into +0.
    return [b if a is None else a for a, b in pairs]


def widened(gradients: Gradients, narrow: Iterable[int]) -> Gradients:
    """Convert some gradients, by number, to the dtype of their sum."""
    result = list(gradients)
    for number in narrow:
        gradient = gradients[number]
        if gradient is not None:
            # Convert before any addition: a bfloat16 sum keeps 8 bits and mostly loses the smaller
            # number, and whether the device or the exchange adds depends on the shares.
            result[number] = gradient.to(added_up_in(gradient.dtype))
    return result


def _apart(gradients: Gradients) -> Gradients:
    """Copy every gradient that shares memory with an earlier one, or within itself."""
    # Skip empty gradients: they have no memory and may report any address.
    extents = {
        number: extent(gradient)
        for number, gradient in enumerate(gradients)
        if gradient is not None and gradient.numel()
    }
    result = list(gradients)
    taken = 0  # addresses below it belong to earlier gradients
    for number in sorted(extents, key=extents.__getitem__):
        gradient = gradients[number]
        if gradient is None:
            continue
        start, stop = extents[number]
        # An expanded tensor, whose elements share memory, is not dense. Neither is a view with
        # gaps, which may contain another gradient.
        dense = stop - start == gradient.numel() * gradient.element_size()
        if not dense or start < taken:
            result[number] = gradient.clone()
        taken = max(taken, stop)
    return result
