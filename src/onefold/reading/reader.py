"""Reads the shards of a batch, in a worker process or in this one."""

from __future__ import annotations

import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, NamedTuple, Protocol

import torch
from torch.utils.data import (
    Dataset,
    TensorDataset,
    default_collate,
)

from onefold.core.randomness import (
    derive_seed,
    loader_seed,
    seed_generators,
)
from onefold.core.shard import Plan
from onefold.reading.datadigest import digest_of, digest_samples, join_digests
from onefold.system.words import message_of

__all__ = [
    "Answer",
    "BadSample",
    "Collate",
    "Reader",
    "Request",
    "SizedDataset",
    "as_it_is",
    "bad_sample",
    "one_thread",
    "take",
]

Collate = Callable[[list[Any]], Any]
"""Makes one shard's payload from its samples."""


class SizedDataset(Protocol):
    """What a loader can read: an object with a length, and an item for every index below it."""

    def __len__(self) -> int: ...

    def __getitem__(self, index: int, /) -> Any: ...


@dataclass(frozen=True, slots=True)
class Request:
    """One batch to read: which samples go into which of this process's shards."""

    loader: int
    epoch: int
    samples: int
    stop: int
    """Number of samples of the pass up to the end of this batch."""
    plan: Plan
    turn: int
    """How often the plan had changed during the pass when this was requested."""
    digest: bytes | None
    """Digest of the order, if a digest is requested as well; empty if it follows from the seed."""
    shards: dict[int, list[int]]
    """The indices of the samples of each of this process's shards, by shard number."""
    starts: dict[int, int]
    """For each shard the place of its first sample in the pass; empty if indices are unique."""
    item: int
    """The item of the data set that is the whole batch; -1 if the batch is made of samples."""


@dataclass(frozen=True, slots=True)
class BadSample:
    """A sample that could not be read, on its way to the process that will report it.

    It holds text and not the exception: one of a class of the user's may not unpickle elsewhere.
    """

    index: int
    epoch: int
    kind: str
    text: str
    traceback: str
    doing: str = "reading sample"
    """What failed, before its number."""


class Answer(NamedTuple):
    """What was read for a request."""

    request: Request
    """As it was made; with other sizes if only reading has shown how large the batch is."""
    payloads: dict[int, Any] | BadSample
    """Each shard's payload."""
    digest: int = 0
    """Digest of the data, and of their order; 0 if it was not requested."""
    state: object = None
    """Where a stream stands after this batch, if it keeps a state."""
    others: tuple[int, ...] = ()
    """See `ShardedBatch.others`."""
    over: bool = False
    """Whether a stream has ended, so that there is no such batch."""


class Reader(Dataset[Any]):
    """Answers requests for batches; every worker process has one."""

    def __init__(self, dataset: SizedDataset, collate: Collate | None, seed: int) -> None:
        self._dataset = self.dataset = dataset
        self._collate = collate
        self._seed = seed

    def __getitem__(self, request: Request) -> Answer:
        payloads, digest = {}, 0
        if request.digest is not None:
            found = self._read_digest(request.epoch, request.digest)
            if isinstance(found, BadSample):
                return Answer(request, found)
            digest = found
        for shard, indices in request.shards.items():
            payload = self._read_shard(request, shard, indices)
            if isinstance(payload, BadSample):
                return Answer(request, payload, digest)
            payloads[shard] = payload
        return Answer(request, payloads, digest)

    def _read_digest(self, epoch: int, order: bytes) -> int | BadSample:
        digests = []
        for index in digest_samples(len(self._dataset)):
            # Without the epoch: the digest is that of the data, whenever a process computes it.
            seed_generators(derive_seed("digest", self._seed, index))
            # Returned rather than raised, as in `_read_shard`: DataLoader would wrap the exception
            # in one of its own, and the user would not learn which sample it was.
            try:
                digests.append(digest_of(self._dataset[index]))
            except Exception as error:
                return bad_sample(index, epoch, error)
        return join_digests(len(self._dataset), [*digests, order])

    def _read_shard(self, request: Request, shard: int, indices: list[int]) -> Any:
        if type(self._dataset) is TensorDataset and self._collate is None:
            # Nothing random, and nothing that can fail: all rows are gathered at once into the list
            # that default_collate would make. A subclass may override how items are read.
            return [tensor[indices] for tensor in self._dataset.tensors]
        samples, seed, epoch, loader = [], self._seed, request.epoch, request.loader
        # Each sample has a seed of its own, so that its augmentation depends neither on the worker
        # that reads it nor on the samples that were read before it. But a sampler
        # may yield a sample several times in a pass, each time augmented in another way: then the
        # place in the pass takes the part of the index.
        first = request.starts.get(shard)
        common = "batch", (seed, epoch, loader, request.stop)
        kind = "sample" if first is None else "place"
        numbers = indices if first is None else range(first, first + len(indices))
        for number, index in zip(numbers, indices, strict=True):
            seed_generators(loader_seed(kind, seed, epoch, number, loader=loader), common=common)
            try:
                samples.append(self._dataset[index])
            except Exception as error:
                return bad_sample(index, epoch, error)
        # Collating may be random, too (mixup). The first number identifies the shard: within an
        # epoch no other shard has it.
        kind = "collate" if first is None else "collate at place"
        drawn = loader_seed(kind, seed, epoch, numbers[0], loader=loader)
        seed_generators(drawn, common=common)
        return (self._collate or default_collate)(samples)


def take(iterator: Iterator[Any], most: int) -> Iterator[Any]:
    """Yield at most so many items of an iterator, without a new ``iter()`` of it.

    Many an object is its own iterator and begins anew with each ``iter()``, which a ``for`` loop
    and `itertools.islice` would call.
    """
    for _ in range(most):
        try:
            item = next(iterator)
        except StopIteration:
            return
        yield item


@contextmanager
def one_thread() -> Iterator[None]:
    """Read with one thread, as PyTorch's worker processes do.

    The bits of a sum depend on the number of threads, so samples that this process reads would
    otherwise differ from those that workers read.
    """
    before = torch.get_num_threads()
    # Setting the number of threads is not free, and each batch would set it twice.
    if before == 1:
        yield
        return
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(before)


def bad_sample(
    index: int, epoch: int, error: Exception, doing: str = "reading sample"
) -> BadSample:
    """Describe an exception that was raised in reading, to be reported elsewhere."""
    trace = "".join(traceback.format_exception(error))
    return BadSample(index, epoch, type(error).__name__, message_of(error), trace, doing)


def as_it_is(answer: Any) -> Any:
    """Return what was given."""
    # DataLoader's default would turn NumPy arrays into tensors. No lambda: a worker that is not
    # forked gets it pickled.
    return answer
