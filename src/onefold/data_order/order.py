"""The order of a pass, who asks for its batches, and who reads them.

`Order` cuts the batches of a pass; `onefold.data_order.from_pytorch` draws one from a sampler.
`Requests` asks for the batches in turn, and `Workers` says which processes answer.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch.utils.data import Dataset

from onefold.core.late import load
from onefold.core.numbers import check_whole
from onefold.core.randomness import kept_generators
from onefold.core.shard import Shares, cut_bounds
from onefold.data_order.position import WHOLE
from onefold.data_order.reader import Answer, Request, one_thread

__all__ = ["Order", "Requests", "Workers", "disown"]


class Numbers(Protocol):
    """Numbers of samples that are drawn when they are asked for."""

    def __len__(self) -> int: ...

    def __getitem__(self, places: slice, /) -> torch.Tensor: ...


@dataclass(frozen=True, slots=True)
class Order:
    """The order of one pass; its places are counted in samples, or in whole batches."""

    indices: torch.Tensor | range | Numbers | None
    """The numbers of the samples, or of items, (samples,) int64; None of a stream, whose order
    nobody knows."""
    batch_size: int = 1
    """Number of samples in a batch; of no meaning if there are ``ends``."""
    ends: Sequence[int] = ()
    """Where each batch ends, for batches of any sizes."""
    digest: bytes = b""
    """What differs for different orders; empty if it follows from the seed alone."""
    repeats: bool = False
    """Whether a sample may come several times in a pass."""
    of_items: bool = False
    """Whether each number is that of a whole batch, which the reader cuts."""

    @property
    def length(self) -> int:
        """How many places the pass has; `WHOLE` if nobody knows."""
        return WHOLE if self.indices is None else len(self.indices)

    def stop(self, start: int) -> int:
        """Return where the batch ends that begins at ``start``; a stream may end before."""
        if self.ends:
            return self.ends[bisect_right(self.ends, start)]
        return min(start + self.batch_size, self.length)

    def cut(
        self, start: int, stop: int, shares: Shares, own: Sequence[int]
    ) -> tuple[dict[int, list[int]], dict[int, int], int]:
        """Cut one batch for the devices ``own``: `Request.shards`, ``starts`` and ``item``."""
        if self.indices is None:
            return {}, {}, -1
        batch = self.indices[start:stop]
        # Lists of numbers, which cost less to send to a worker than tensors, each a file
        # descriptor.
        numbers = batch.tolist() if isinstance(batch, torch.Tensor) else batch
        if self.of_items:
            return {}, {}, numbers[0]
        bounds = cut_bounds(len(numbers), shares.shards)
        shards = {
            shard: [*numbers[slice(*bounds[shard])]]
            for device in own
            for shard in shares.read_by(device)
            if bounds[shard][0] < bounds[shard][1]
        }
        starts = {shard: start + bounds[shard][0] for shard in shards} if self.repeats else {}
        return shards, starts, -1

    def first_shard(self, start: int, stop: int, shares: Shares) -> tuple[list[int], int | None]:
        """Return the samples of a batch's first shard: `Request.check`."""
        if self.indices is None or self.of_items:
            return [], None
        _, end = cut_bounds(stop - start, shares.shards)[0]
        return [*map(int, self.indices[start : start + end])], start if self.repeats else None


@dataclass(frozen=True, slots=True, kw_only=True)
class Workers:
    """How many processes read ahead for a loader, and how they are made."""

    number: int
    """0 to read in this process."""
    init: Callable[[int], object] | None = None
    """Called in each worker with its number, before it reads."""
    prefetch: int | None = None
    """How many batches each worker reads ahead; PyTorch's usual number if None."""
    context: Any = None
    """How processes are made, as `torch.utils.data.DataLoader` takes it; the usual way if None."""

    def __post_init__(self) -> None:
        check_whole("workers", self.number, least=0)
        if self.init is not None and not callable(self.init):
            raise TypeError(f"expected worker_init_fn to be a function, got {self.init!r}")
        if self.number:
            load("data_order.worker_processes").check_temporary_path(self.number)

    def answers(
        self, reader: Dataset[Answer], requests: Requests, *, pin_memory: bool, timeout_s: float
    ) -> Iterator[Answer]:
        """Start the processes, and return the iterator over their answers, which ends them."""
        if not self.number:
            return _read_here(reader, requests)
        start = load("data_order.worker_processes").start_workers
        answers: Iterator[Answer]
        answers = start(self, reader, requests, pin_memory=pin_memory, timeout_s=timeout_s)
        return answers


def _read_here(reader: Dataset[Answer], requests: Requests) -> Iterator[Answer]:
    for request in requests:
        # The yield stays outside: generators and threads must be the caller's again by then.
        with kept_generators(), one_thread():
            answer = reader[request]
        yield answer


def disown(answers: Iterator[Answer]) -> None:
    """Let go of the workers in a forked child that leaves the pass: they still read for its parent.

    PyTorch ends them when the iterator is destroyed, whichever process destroys it.
    """
    # DataLoader's own mark for an iterator whose workers have been ended already. An iterator of
    # ours, without workers, has nothing to let go of.
    if hasattr(answers, "_shutdown"):
        answers._shutdown = True


@dataclass
class Requests:
    """The batches of a pass that are to be read in turn; starts over if shares or devices change.

    Note: shares that change while workers read ahead
    --------------------------------------------------
    A batch has the shares of the moment at which it is handed out, so that devices agree however
    far ahead each of them reads. If the shares have changed, the requests go back to the first
    batch that was not handed out, and the loader drops the answers to requests of an earlier turn.
    DataLoader draws another request for each answer that it receives, even if there was none left
    before: so ``__next__`` may continue after it has raised StopIteration.

    It does not refer to the loader: see the note on who keeps the workers alive.
    """

    epoch: int
    """Number of the pass."""
    start: int
    """The place in it of the next batch."""
    end: int
    """Where the pass ends."""
    order: Order
    loader: int
    """Number of the loader."""
    shares: Shares
    """The shares of the next batch."""
    own: Sequence[int]
    """Numbers of this process's devices."""
    checks: bool = False
    """Whether the next request asks for its first shard to be made twice."""
    compares: bool = True
    """Whether the next request asks for the digest of a data set, as the first of a pass does."""
    turn: int = 0
    """How often shares or devices have changed during this pass."""

    def __iter__(self) -> Requests:
        return self

    def __next__(self) -> Request:
        if self.start >= self.end:
            raise StopIteration
        start = self.start
        self.start = stop = min(self.order.stop(start), self.end)
        cut = self.order.cut(start, stop, self.shares, self.own)
        digest = self.order.digest if self.compares else None
        check = self.order.first_shard(start, stop, self.shares) if self.checks else None
        self.compares = self.checks = False
        numbers = self.loader, self.epoch, stop - start, stop
        return Request(*numbers, self.shares, self.own, self.turn, digest, *cut, check)

    def follow(self, shares: Shares, own: Sequence[int], start: int) -> None:
        """Go back to place ``start`` of the pass if the shares or this process's devices differ."""
        # The identity first: it settles nearly every step without comparing the counts.
        if (shares is not self.shares or own is not self.own) and (
            (shares, own) != (self.shares, self.own)
        ):
            self.turn += 1
            self.shares, self.own, self.start = shares, own, start
