"""The order of a pass, the requests for its batches, and the processes that read them.

`LoaderSize` determines the batches of all passes. `Order` cuts the batches of one pass;
`onefold.data_order.from_pytorch` draws one from a sampler. `Requests` yields the requests for
batches, and `Workers` starts the processes that answer them.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import dataclass
from typing import Annotated, Any, Protocol

import torch
from msgspec import Meta, Struct
from torch.utils.data import Dataset

from onefold.core.encoding import Count
from onefold.core.late import load
from onefold.core.numbers import check_whole
from onefold.core.randomness import kept_generators
from onefold.core.settings import check_same
from onefold.core.shard import Shares, cut_bounds
from onefold.data_order.reader import Answer, Request, one_thread

__all__ = ["WHOLE", "LoaderSize", "Order", "Requests", "Workers", "disown"]

WHOLE = 1 << 60
"""Stands for a whole pass whose length is unknown until its order is drawn or it is read."""
_PLAIN = "samples by number"


class LoaderSize(Struct, frozen=True, kw_only=True):
    """All properties that determine the batches of a loader's passes, except the seed."""

    samples: Count
    """Number of samples in the data set."""
    batch_size: Annotated[int, Meta(ge=1, lt=1 << 62)]
    drop_last: bool = False
    shuffle: bool = False
    lengths: str = ""
    """Digest of the samples' lengths if batches are made by length; otherwise empty."""
    subset: str = ""
    """Digest of the selected samples if the data set is a `Subset`; otherwise empty."""
    kind: str = ""
    """Source of the order if it also determines the length of a pass; otherwise empty."""

    def batches(self, samples: int) -> int:
        """Return the number of batches in so many samples of a pass."""
        whole, rest = divmod(samples, self.batch_size)
        return whole + bool(rest and not self.drop_last)

    def check_same(self, now: LoaderSize, allow_changed: Collection[str]) -> None:
        """Refuse a loader that differs from this saved one.

        Raises:
            CheckpointError: the loaders differ.
        """
        rows: list[tuple[str, str, object, object]] = [
            ("dataset", "a loader of", self.kind or _PLAIN, now.kind or _PLAIN),
            ("dataset", "a data set of length", self.samples, now.samples),
            ("batch_size", "batch_size", self.batch_size, now.batch_size),
            ("batch_size", "drop_last", self.drop_last, now.drop_last),
            ("dataset", "shuffle", self.shuffle, now.shuffle),
            ("dataset", "lengths of samples, as a digest", self.lengths, now.lengths),
            ("dataset", "a subset of samples, as a digest,", self.subset, now.subset),
        ]
        # Batches by length are shuffled as units, so batch_size determines the order of samples.
        if self.lengths:
            name = "batches by length, of batch_size"
            rows.insert(3, ("dataset", name, self.batch_size, now.batch_size))
        for what, name, saved, value in rows:
            check_same(what, saved, value, allow_changed, name)


class Numbers(Protocol):
    """A sequence of sample indices that are drawn on access."""

    def __len__(self) -> int: ...

    def __getitem__(self, places: slice, /) -> torch.Tensor: ...


@dataclass(frozen=True, slots=True)
class Order:
    """The order of one pass; positions count samples, or whole batches."""

    indices: torch.Tensor | range | Numbers | None
    """Indices of samples or items, (samples,) int64; None for a stream, whose order is unknown."""
    batch_size: int = 1
    """Number of samples in a batch; ignored if there are ``ends``."""
    ends: Sequence[int] = ()
    """End of each batch, for batches of different sizes."""
    digest: bytes = b""
    """Distinguishes different orders; empty if the order follows from the seed alone."""
    repeats: bool = False
    """Whether a sample may occur several times in a pass."""
    of_items: bool = False
    """Whether each index is the number of a whole batch, which the reader cuts."""

    @property
    def length(self) -> int:
        """Number of positions in the pass; `WHOLE` if unknown."""
        return WHOLE if self.indices is None else len(self.indices)

    def stop(self, start: int) -> int:
        """Return the end of the batch that starts at ``start``; a stream may end earlier."""
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
        # Use lists: a tensor costs a file descriptor when it is sent to a worker.
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
    """The number of worker processes of a loader, and how they are started."""

    number: int
    """0 to read in this process."""
    init: Callable[[int], object] | None = None
    """Called in each worker with its number, before it reads."""
    prefetch: int | None = None
    """Number of batches that each worker prefetches; PyTorch's default if None."""
    context: Any = None
    """Multiprocessing context, as in `torch.utils.data.DataLoader`; the default if None."""

    def __post_init__(self) -> None:
        check_whole("workers", self.number, least=0)
        if self.init is not None and not callable(self.init):
            raise TypeError(f"expected worker_init_fn to be a function, but got {self.init!r}")
        if self.number:
            load("data_order.worker_processes").check_temporary_path(self.number)

    def answers(
        self, reader: Dataset[Answer], requests: Requests, *, pin_memory: bool, timeout_s: float
    ) -> Iterator[Answer]:
        """Start the workers; return the iterator over their answers, which ends the workers."""
        if not self.number:
            return _read_here(reader, requests)
        start = load("data_order.worker_processes").start_workers
        answers: Iterator[Answer]
        answers = start(self, reader, requests, pin_memory=pin_memory, timeout_s=timeout_s)
        return answers


def _read_here(reader: Dataset[Answer], requests: Requests) -> Iterator[Answer]:
    for request in requests:
        # Yield outside the block: by then generators and threads must be the caller's again.
        with kept_generators(), one_thread():
            answer = reader[request]
        yield answer


def disown(answers: Iterator[Answer]) -> None:
    """Release the workers in a forked child that leaves the pass: they still read for the parent.

    PyTorch ends the workers when any process destroys the iterator.
    """
    # Set DataLoader's own mark of an iterator whose workers have ended. The iterator of
    # `_read_here` has no workers, and lacks the mark.
    if hasattr(answers, "_shutdown"):
        answers._shutdown = True


@dataclass
class Requests:
    """Requests for the batches of a pass, in order. Restarts if shares or devices change.

    Note: shares that change during prefetching
    -------------------------------------------
    A batch is cut by the shares at the time when it is yielded, so that devices agree however far
    each of them prefetches. If the shares have changed, the requests return to the first batch that
    was not yielded, and the loader drops the answers to requests of an earlier turn. DataLoader
    calls ``__next__`` for each answer that it receives, even after StopIteration, so ``__next__``
    may continue after raising it.

    Requests do not refer to the loader: see the note on who keeps the workers alive.
    """

    epoch: int
    """Number of the pass."""
    start: int
    """Start of the next batch in the pass."""
    end: int
    """End of the pass."""
    order: Order
    loader: int
    """Number of the loader."""
    shares: Shares
    """The shares of the next batch."""
    own: Sequence[int]
    """Numbers of this process's devices."""
    checks: bool = False
    """Whether the next request is for the loader's first shard to be made twice."""
    compares: bool = True
    """Whether the next request includes the digest of the data set, as the first of a pass does."""
    turn: int = 0
    """Number of changes of shares or devices during this pass."""

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
        """Return to position ``start`` if the shares or this process's devices have changed."""
        # Compare identity first: in nearly every step this saves comparing the counts.
        if (shares is not self.shares or own is not self.own) and (
            (shares, own) != (self.shares, self.own)
        ):
            self.turn += 1
            self.shares, self.own, self.start = shares, own, start
