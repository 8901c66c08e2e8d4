"""Takes over the gradients that backward leaves behind, shard by shard, and computes their norms.

`take_gradients` takes one shard's gradients, each in memory of its own. `PieceNorms` computes the
norm of the whole gradient, of which each device has the pieces that it owns.

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

Note: two norms
---------------
Of several shards, the squares of each piece are added up in float64, and then those of the pieces:
pieces do not depend on the number of devices, so neither does the order of addition. Of a single
shard it is PyTorch's own, to the last bit: the norm of each parameter's gradient, and the norm of
these norms.
"""

from __future__ import annotations

import math
import operator
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import groupby, islice
from typing import NoReturn

import torch

from onefold.core.flat import FlatTensors, extent, laid_out, storage_order
from onefold.core.precision import added_up_in
from onefold.core.shard import runs_of
from onefold.core.storage import Storage
from onefold.engine.visits import OwnedPiece
from onefold.errors import GradientError
from onefold.system.compat import add_each

__all__ = [
    "Gradients",
    "ParameterSet",
    "PieceNorms",
    "add_gradients",
    "drop_gradients",
    "exact_norm",
    "exact_total",
    "gradients_of",
    "keeping_gradients",
    "plain_norm",
    "take_gradients",
    "widened",
]


_grad = operator.attrgetter("grad")
_layout = operator.attrgetter("layout")

Gradients = list[torch.Tensor | None]
"""One tensor for each trained parameter, of its shape, in the dtype in which they are added up;
None where a shard gave none."""


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
        for parameter, gradient in zip(listed, kept, strict=True):
            if parameter.grad is not gradient:
                parameter.grad = gradient


def take_gradients(
    parameters: Sequence[torch.nn.Parameter],
    strides: Sequence[tuple[int, ...]],
    names: Sequence[str],
    where: str,
    left_out: Sequence[int] = (),
) -> Gradients:
    """Take what backward left in ``.grad`` into our ownership, and leave None there.

    Args:
        parameters: the trained ones.
        strides: the parameters' own, which the gradients get as well.
        names: of the parameters.
        where: step and shard, for errors.
        left_out: numbers of parameters whose gradients are dropped.

    Raises:
        GradientError: a gradient is sparse.
    """
    gradients = gradients_of(parameters)
    for number in left_out:
        gradients[number] = None
    # Autograd adds in place to whatever .grad holds: the next shard's gradient would land in this
    # one's memory.
    for parameter in parameters:
        parameter.grad = None
    given = [gradient for gradient in gradients if gradient is not None]
    if set(map(_layout, given)) - {torch.strided}:
        _refuse_sparse(gradients, names, where)
    # A quick test that errs on the safe side only: gradients that share memory are views of one
    # tensor, so either two begin at one address, or one begins elsewhere than its storage does.
    starts = set(map(torch.Tensor.data_ptr, given))
    if len(starts) < len(given) or any(map(torch.Tensor.storage_offset, given)):
        gradients = _apart(gradients)
    if len(given) == len(gradients) and list(map(torch.Tensor.stride, given)) == strides:
        return gradients
    pairs = zip(gradients, strides, strict=True)
    return [None if g is None else _laid_out_like(g, stride) for g, stride in pairs]


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


def exact_norm(gradient: torch.Tensor) -> torch.Tensor:
    """The norm of one gradient, () float64: finite wherever the gradient is."""
    if gradient.is_complex():
        gradient = torch.view_as_real(gradient)
    norm: torch.Tensor = torch.linalg.vector_norm(gradient, dtype=torch.float64)
    return norm


def widened(gradients: Gradients, narrow: Iterable[int]) -> Gradients:
    """Convert some gradients, by number, to the dtype in which they are added up."""
    result = list(gradients)
    for number in narrow:
        gradient = gradients[number]
        if gradient is not None:
            # Before any addition: in the sum of two numbers of 8 bits the smaller one is mostly
            # lost, and where a device adds and where the exchange does depends on the plan.
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


def _laid_out_like(gradient: torch.Tensor, stride: tuple[int, ...]) -> torch.Tensor:
    """Return a gradient in its parameter's strides, copied only where they differ."""
    if gradient.stride() == stride:
        return gradient
    # The stride of a dimension of length 1 says nothing about memory, and PyTorch sets it freely.
    sides = zip(gradient.shape, gradient.stride(), stride, strict=True)
    if all(ours == theirs for size, ours, theirs in sides if size > 1):
        return gradient
    return laid_out(gradient, stride)


def _refuse_sparse(gradients: Gradients, names: Sequence[str], where: str) -> NoReturn:
    name = next(
        name
        for name, gradient in zip(names, gradients, strict=True)
        if gradient is not None and gradient.layout is not torch.strided
    )
    raise GradientError(
        f"{where}: parameter {name} got a sparse gradient, a dense one is expected. Make its "
        f"layer with sparse=False"
    )


Share = Callable[[Mapping[int, torch.Tensor]], torch.Tensor]
"""Brings a row of float64 from each device to all: see `Transport.share`."""


def plain_norm(gradients: Sequence[torch.Tensor]) -> torch.Tensor:
    """The norm, (), of some gradients as torch.nn.utils.clip_grad_norm_ computes it.

    Not finite if the gradients are so large that their squares are not; see `exact_total`.
    """
    return torch.nn.utils.get_total_norm(gradients) if gradients else torch.zeros(())


def exact_total(norms: Sequence[torch.Tensor]) -> torch.Tensor:
    """The norm, () float64, of gradients of which norms are given, each () float64."""
    return torch.stack([norm.square() for norm in norms]).sum().sqrt()


class PieceNorms:
    """Computes the norms of the pieces of this process, and hears of those of the others.

    Args:
        storage: the sizes of the run.
        memory: of each device of this process, by number.
        spans: for each device of the run, the numbers of the pieces that it owns.
    """

    def __init__(
        self,
        storage: Storage,
        memory: Mapping[int, FlatTensors],
        spans: Sequence[Sequence[int]],
    ) -> None:
        self._storage = storage
        # A device whose span is empty has a row as well: all devices must share alike.
        self._rows = {
            device: torch.zeros(len(storage.pieces), dtype=torch.float64, device=flat.device)
            for device, flat in memory.items()
        }
        # In slices: a list of their numbers would have to be copied to a GPU, and where scripts ask
        # for deterministic kernels, waited for.
        self._slots = {
            device: [(row[run], run.stop - run.start) for run in runs_of(spans[device])]
            for device, row in self._rows.items()
        }

    def squared(self, gradients: Gradients, share: Share) -> torch.Tensor:
        """The squared norm, (), of the whole gradient.

        Args:
            gradients: of the pieces of this process, in the order of their devices.
            share: brings rows to all devices.
        """
        # A norm for each piece and never for a span: see the head of this file.
        given = iter(gradients)
        for slots in self._slots.values():
            for slot, pieces in slots:
                norms = [
                    slot.new_zeros(()) if gradient is None else exact_norm(gradient.to(slot.device))
                    for gradient in islice(given, pieces)
                ]
                torch.stack(norms, out=slot).square_()
        return self._shared(share).sum()

    def of_one_shard(
        self,
        owned: Sequence[OwnedPiece],
        gradients: Gradients,
        gave: Sequence[int],
        share: Share,
        *,
        widened: bool,
    ) -> torch.Tensor:
        """The norm, (), of the whole gradient of a single shard.

        Args:
            owned: the pieces of this process; all of a parameter's are one process's.
            gradients: of these pieces.
            gave: for each trained parameter, whether it was given a gradient.
            share: brings rows to all devices.
            widened: whether gradients are in the dtype in which sums are.
        """
        layout = self._storage.gradients if widened else self._storage.parameters
        norms = self._by_parameter(owned, gradients, gave, share, lambda each: plain_norm([each]))
        # Norms of one number each are that number: what remains is the norm of the norms, in the
        # order in which PyTorch goes through gradients of several dtypes.
        norm = plain_norm([norms[n].to(layout.dtype_of(n)).reshape(1) for n in norms])
        if norm.device.type != "cpu" or math.isfinite(norm.item()):
            return norm
        exact = self._by_parameter(owned, gradients, gave, share, exact_norm)
        return exact_total([*exact.values()])

    def _by_parameter(
        self,
        owned: Sequence[OwnedPiece],
        gradients: Gradients,
        gave: Sequence[int],
        share: Share,
        norm_of: Callable[[torch.Tensor], torch.Tensor],
    ) -> dict[int, torch.Tensor]:
        """The norm of each parameter's gradient, () float64, by the number, in order."""
        for row in self._rows.values():
            row.zero_()
        for number, device, gradient in self._whole(owned, gradients):
            row = self._rows[device]
            row[number] = norm_of(gradient.to(row.device))
        norms = self._shared(share)
        firsts: dict[int, int] = {}
        for number, piece in enumerate(self._storage.pieces):
            firsts.setdefault(piece.entry, number)
        # Pieces lie in the order of memory, where parameters of one dtype are together.
        return {entry: norms[firsts[entry]] for entry in sorted(firsts) if gave[entry]}

    def _whole(
        self, owned: Sequence[OwnedPiece], gradients: Gradients
    ) -> Iterator[tuple[int, int, torch.Tensor]]:
        """Yield each parameter's gradient with the number of its first piece, and its device."""
        pairs = zip(owned, gradients, strict=True)
        for entry, group in groupby(pairs, key=lambda pair: pair[0].piece.entry):
            items, parts = zip(*group, strict=True)
            given = [part for part in parts if part is not None]
            if not given:
                continue
            whole = given[0]
            if not items[0].piece.whole:
                shaped = self._storage.gradients.entries[entry]
                whole = torch.cat([storage_order(part) for part in given])
                whole = whole.as_strided(shaped.shape, shaped.stride)
            yield items[0].number, items[0].device, whole

    def _shared(self, share: Share) -> torch.Tensor:
        """What all devices have, (pieces,): a piece has one owner, and adding zeros is exact."""
        rows = share(self._rows)
        return rows.sum(dim=0) if len(rows) > 1 else rows[0]
