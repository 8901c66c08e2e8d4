"""`gather`, by which a loss sees the tensors of all shards, and how it finds the shard it is in.

What is done with a tensor is up to the `Gatherer` of the shard that is being computed; those of a
step that joins shards are in `onefold.engine.together`.

Note: one place for the whole process
-------------------------------------
Only one shard computes at a time, also where shards take turns, so the gatherer is held in one
place and not in one for each thread. Backward on a GPU runs in a thread of PyTorch's, where a layer
that is computed once more (``torch.utils.checkpoint``) must find it as well.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Literal, NamedTuple, overload

import torch

from onefold.core.flat import bits_of
from onefold.errors import LossError

__all__ = [
    "Discovering",
    "Gatherer",
    "Gathers",
    "Joined",
    "Refusing",
    "gather",
    "gathering",
    "in_turn",
    "join",
    "joins",
    "packed_bytes",
    "unpacked_bytes",
]

_ALIGNED = 16
"""Bytes of the largest element of a tensor, of which packed tensors have a multiple."""


class Joined(NamedTuple):
    """A tensor of all shards, and which of its rows are this shard's."""

    whole: torch.Tensor  # (N, ...)
    own: slice


class Gathers(BaseException):
    """Ends a shard whose step does not know yet that its loss gathers; never reaches a script."""

    # Not an Exception: a loss may well catch those.


class Gatherer(ABC):
    """What `gather` does in one shard, from the call of its loss to the end of its backward."""

    is_of_step = True
    """Whether the shard is one of a step, and not of an evaluation."""
    takes_turns = False
    """Whether other shards compute in between, so that its time is measured elsewhere."""
    sees_batch = False
    """Whether the loss itself has gathered: what it returns may be of more than its own samples."""

    @abstractmethod
    def gather(self, tensor: torch.Tensor) -> Joined:
        """Join a tensor of this shard with those of all others."""

    def end_forward(self, terms: Sequence[tuple[str, float]]) -> Sequence[float] | None:
        """Note that the loss has returned; called before backward.

        Args:
            terms: kind and weight of each term of the loss.

        Returns:
            The divisors of several terms, if they became known while the loss was computed.
        """
        return None

    @property
    def roots(self) -> list[tuple[torch.Tensor, torch.Tensor]]:
        """Tensors from which backward starts beside the loss, with their gradients."""
        return []


class Discovering(Gatherer):
    """Ends the shard: the step is begun again as one that joins shards."""

    def gather(self, tensor: torch.Tensor) -> Joined:
        raise Gathers


class Refusing(Gatherer):
    """Refuses to gather.

    Args:
        why: the message.
        is_of_step: whether the shard is one of a step.
    """

    def __init__(self, why: str, *, is_of_step: bool) -> None:
        self._why = why
        self.is_of_step = is_of_step

    def gather(self, tensor: torch.Tensor) -> Joined:
        raise LossError(self._why)


class _Place:
    """Where the gatherer is."""

    gatherer: Gatherer | None = None


_place = _Place()


@contextmanager
def gathering(gatherer: Gatherer | None) -> Iterator[None]:
    """Have `gather` find this gatherer inside the context; with None it changes nothing."""
    _place.gatherer = gatherer
    try:
        yield
    finally:
        # Not the one before: shards that take turns do not end in the order in which they began.
        _place.gatherer = None


def in_turn(gatherer: Gatherer) -> None:
    """Have `gather` find this gatherer, whose shard goes on."""
    _place.gatherer = gatherer


def joins() -> bool:
    """Whether a shard of a step is being computed that is not the whole batch."""
    return _place.gatherer is not None and _place.gatherer.is_of_step


@overload
def gather(tensor: torch.Tensor, *, rows: Literal[False] = False) -> torch.Tensor: ...


@overload
def gather(tensor: torch.Tensor, *, rows: Literal[True]) -> tuple[torch.Tensor, slice]: ...


def gather(
    tensor: torch.Tensor, *, rows: bool = False
) -> torch.Tensor | tuple[torch.Tensor, slice]:
    """Return a tensor of all shards; for use inside a loss that compares samples with each other.

    Gradients flow through it to all shards, and the bits are the same for any number of devices.
    Outside of a step, and where one shard is the whole batch, it returns ``tensor`` itself.

    >>> features = torch.eye(3)
    >>> whole, own = gather(features, rows=True)
    >>> whole[own] is features or torch.equal(whole[own], features)
    True

    Args:
        tensor: (n, ...) of any dtype: this shard's rows, mostly one a sample. Number of dimensions,
            further sizes and dtype must be alike in all shards; n may differ.
        rows: whether to return which rows are this shard's as well; see `docs/whole-batch.md`.

    Returns:
        (N, ...) the rows of all shards in their order; with ``rows``, also the slice of the own.

    Raises:
        LossError: shards do not gather alike, or it is called where nothing can be gathered: in a
            score function, in a shard that ``microbatch`` has cut, inside of a checkpointed layer.
        TypeError, ValueError: there are no rows.

    The memory that it saves is the idea of Gao et al., Scaling Deep Contrastive Learning Batch Size
    under Memory Limited Setup, 2021.
    """
    if not isinstance(tensor, torch.Tensor):
        raise TypeError(f"expected a tensor to gather, got {type(tensor).__name__}")
    if not tensor.dim() or tensor.layout is not torch.strided:
        raise ValueError(
            f"expected a dense tensor of shape (n, ...) to gather, got shape {tuple(tensor.shape)} "
            f"({tensor.layout}). Of single numbers make a row: value.reshape(1)"
        )
    joined = join(tensor)
    if _place.gatherer is not None:
        _place.gatherer.sees_batch = True
    return (joined.whole, joined.own) if rows else joined.whole


def join(tensor: torch.Tensor) -> Joined:
    """Gather for a layer: what the loss is a mean over does not change by it."""
    if _place.gatherer is None:
        return Joined(tensor, slice(0, len(tensor)))
    return _place.gatherer.gather(tensor)


def packed_bytes(tensors: Sequence[torch.Tensor], nbytes: int) -> torch.Tensor:
    """Copy tensors one after the other, as bits, for a way on which only float64 travels.

    Args:
        tensors: all of one dtype, at least one.
        nbytes: size of the result, with zeros at its end; rounded up.

    Returns:
        (k,) float64 whose values mean nothing.
    """
    flat = torch.cat([*map(bits_of, tensors)])
    room = torch.zeros(-(-nbytes // _ALIGNED) * _ALIGNED, dtype=torch.uint8, device=flat.device)
    room[: flat.nbytes] = flat
    return room.view(torch.float64)


def unpacked_bytes(
    row: torch.Tensor, dtype: torch.dtype, shapes: Sequence[tuple[int, ...]]
) -> list[torch.Tensor]:
    """Return the tensors that `packed_bytes` has packed, as views of its result."""
    counts = [torch.Size(shape).numel() for shape in shapes]
    flat = row.view(torch.uint8)[: sum(counts) * dtype.itemsize].view(dtype)
    parts = torch.split(flat, counts)
    return [part.view(shape) for part, shape in zip(parts, shapes, strict=True)]
