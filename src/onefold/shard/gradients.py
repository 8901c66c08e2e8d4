"""Takes over the gradients that backward leaves behind, shard by shard, each in its own memory.

Note: who owns a gradient
-------------------------
A shard begins with nothing in ``.grad`` and its gradients are taken away before the next one
begins, so the user's code (hooks, an inner backward, ``zero_grad()``) only ever sees its own
shard's. From then on they are onefold's, which adds to them in place: in the fold, and in the
exchange. That is why no two of them may share memory. Autograd does give two parameters views of
one tensor, where they went through ``torch.cat`` or a sum, and a hook may hand over a tensor that
it keeps, one that is expanded, or one whose strides are not its parameter's. Such gradients are
copied first, into the parameter's strides: a norm is added up in the order of the memory, and fused
optimizers read gradients in the parameter's order, whatever their strides.
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
    """Trained parameters whose gradients are taken together: all, or those of one stage."""

    parameters: Sequence[torch.nn.Parameter]
    strides: Sequence[tuple[int, ...]]
    """The parameters' own, which gradients get as well."""
    names: Sequence[str]
    places: Mapping[int, int] | None = None
    """By the number of a parameter among all, its place here; None for all parameters."""

    def some(self, numbers: Sequence[int]) -> ParameterSet:
        """Choose some of all parameters, by their numbers."""
        return ParameterSet(
            [self.parameters[number] for number in numbers],
            [self.strides[number] for number in numbers],
            [self.names[number] for number in numbers],
            {number: place for place, number in enumerate(numbers)},
        )

    @property
    def numbers(self) -> Sequence[int]:
        """The number of each parameter among all."""
        return range(len(self.names)) if self.places is None else list(self.places)

    def places_of(self, numbers: Sequence[int]) -> Sequence[int]:
        """The places here of some parameters, as far as they are here."""
        if self.places is None or not numbers:
            return numbers
        return [self.places[number] for number in numbers if number in self.places]


def gradients_of(parameters: Iterable[torch.nn.Parameter]) -> Gradients:
    """List what each parameter has in ``.grad``; ownership stays where it is."""
    return list(map(_grad, parameters))


def drop_gradients(parameters: Iterable[torch.nn.Parameter]) -> None:
    """Set every parameter's ``.grad`` to None."""
    for parameter in parameters:
        # Setting .grad takes several times as long as reading it, and mostly there is nothing.
        if parameter.grad is not None:
            parameter.grad = None


@contextmanager
def keeping_gradients(parameters: Iterable[torch.nn.Parameter]) -> Iterator[None]:
    """Put back what each parameter has in ``.grad``, the script's, after memory was changed."""
    listed = list(parameters)
    kept = gradients_of(listed)
    try:
        yield
    finally:
        put_gradients(listed, kept)


def put_gradients(parameters: Iterable[torch.nn.Parameter], gradients: Gradients) -> None:
    """Set every parameter's ``.grad``."""
    for parameter, gradient in zip(parameters, gradients, strict=True):
        # Setting .grad takes several times as long as reading it, and mostly there is nothing.
        if parameter.grad is not gradient:
            parameter.grad = gradient


def take_gradients(taken: ParameterSet, where: str, left_out: Sequence[int] = ()) -> Gradients:
    """Take what backward left in ``.grad`` into our ownership, and leave None there.

    Args:
        taken: the parameters, of all or of one stage.
        where: step and shard, for errors.
        left_out: numbers, among all parameters, of those whose gradients are dropped.

    Raises:
        GradientError: a gradient is sparse.
    """
    gradients = gradients_of(taken.parameters)
    for place in taken.places_of(left_out):
        gradients[place] = None
    # Autograd adds in place to whatever .grad holds: the next shard's gradient would land in this
    # one's memory.
    for parameter in taken.parameters:
        parameter.grad = None
    given = [gradient for gradient in gradients if gradient is not None]
    if set(map(_layout, given)) - {torch.strided}:
        named = zip(taken.names, gradients, strict=True)
        name = next(n for n, g in named if g is not None and g.layout is not torch.strided)
        raise GradientError(
            f"{where}: parameter {name} got a sparse gradient, a dense one is expected. Make its "
            f"layer with sparse=False"
        )
    # A quick test that errs on the safe side only: gradients that share memory are views of one
    # tensor, so either two begin at one address, or one begins elsewhere than its storage does.
    starts = set(map(torch.Tensor.data_ptr, given))
    if len(starts) < len(given) or any(map(torch.Tensor.storage_offset, given)):
        gradients = _apart(gradients)
    if len(given) == len(gradients) and list(map(torch.Tensor.stride, given)) == taken.strides:
        return gradients
    pairs = zip(gradients, taken.strides, strict=True)
    return [None if g is None else laid_out(g, stride) for g, stride in pairs]


class GradientHandover:
    """The memory of gradients that a shard has handed over, stage by stage.

    Autograd may give parameters of several stages views of one tensor. Whoever adds to one of them
    in place must not change the other.
    """

    def __init__(self) -> None:
        self._storages: dict[int, StorageWeakRef] = {}

    def apart(self, gradients: Gradients) -> Gradients:
        """Copy those that share memory with gradients that were handed over before."""
        result, before = list(gradients), dict(self._storages)
        for place, gradient in enumerate(gradients):
            if gradient is not None:
                storage = gradient.untyped_storage()
                earlier = before.get(storage.data_ptr())
                # What is no longer there may lie at the same address.
                if earlier is not None and not earlier.expired():  # type: ignore[no-untyped-call]
                    result[place] = gradient.clone()
                else:
                    self._storages[storage.data_ptr()] = StorageWeakRef(storage)  # type: ignore[no-untyped-call]
        return result


def add_gradients(left: Gradients, right: Gradients) -> Gradients:
    """Add two lists of gradients; where both have one, the left one's memory takes the sum.

    Raises:
        GradientError: a parameter has the same tensor in both lists.
    """
    pairs = list(zip(left, right, strict=True))
    both = [(a, b) for a, b in pairs if a is not None and b is not None]
    # A hook has put its own tensor into .grad twice: added to itself, it would count double and
    # the left shard's values would be lost already.
    if any(a is b for a, b in both):
        raise GradientError(
            "a hook of a parameter put the same tensor into .grad for two shards: give each of "
            "them a tensor of its own (clone what you keep)"
        )
    if both:
        add_each([a for a, _ in both], [b for _, b in both])
    # A gradient that stands alone is passed on as it is: adding zeros to it would cost a pass over
    # memory, and turn -0 into +0.
    return [b if a is None else a for a, b in pairs]


def widened(gradients: Gradients, narrow: Iterable[int]) -> Gradients:
    """Convert some gradients, by number, to the dtype in which they are added up."""
    result = list(gradients)
    for number in narrow:
        gradient = gradients[number]
        if gradient is not None:
            # Before any addition: in the sum of two numbers of 8 bits the smaller one is mostly
            # lost, and where a device adds and where the exchange does depends on the shares.
            result[number] = gradient.to(added_up_in(gradient.dtype))
    return result


def _apart(gradients: Gradients) -> Gradients:
    """Copy every gradient that shares memory with one before it, or with itself."""
    # Without the empty ones, which have no memory and may report any address.
    extents = {
        number: extent(gradient)
        for number, gradient in enumerate(gradients)
        if gradient is not None and gradient.numel()
    }
    result = list(gradients)
    taken = 0  # addresses below it belong to gradients that were seen
    for number in sorted(extents, key=extents.__getitem__):
        gradient = gradients[number]
        if gradient is None:
            continue
        start, stop = extents[number]
        # Not dense: an expanded tensor, whose elements share memory, or a view with gaps, in which
        # another may lie.
        dense = stop - start == gradient.numel() * gradient.element_size()
        if not dense or start < taken:
            result[number] = gradient.clone()
        taken = max(taken, stop)
    return result
