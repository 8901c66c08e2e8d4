"""Reads the shards of a batch, in a worker process or in this one."""

from __future__ import annotations

import multiprocessing
import os
import threading
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Protocol

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
from onefold.system.interrupt import ctrl_c_as_before
from onefold.system.process import die_with_parent

__all__ = [
    "Answer",
    "BadSample",
    "Collate",
    "Reader",
    "Request",
    "SizedDataset",
    "Tied",
    "as_it_is",
    "one_thread",
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
    digest: bool
    """Whether the digest of the data set is requested as well."""
    shards: dict[int, list[int]]
    """The indices of the samples of each of this process's shards, by shard number."""


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


Answer = tuple[Request, dict[int, Any] | BadSample, int]
"""The request, each shard's payload, and the digest of the data set (0 if it was not requested)."""


class Reader(Dataset[Any]):
    """Answers requests for batches; every worker process has one."""

    def __init__(self, dataset: SizedDataset, collate: Collate | None, seed: int) -> None:
        self._dataset = dataset
        self._collate = collate
        self._seed = seed

    def __getitem__(self, request: Request) -> Answer:
        payloads, digest = {}, 0
        if request.digest:
            found = self._read_digest(request.epoch)
            if isinstance(found, BadSample):
                return request, found, 0
            digest = found
        for shard, indices in request.shards.items():
            payload = self._read_shard(request, indices)
            if isinstance(payload, BadSample):
                return request, payload, digest
            payloads[shard] = payload
        return request, payloads, digest

    def _read_digest(self, epoch: int) -> int | BadSample:
        digests = []
        for index in digest_samples(len(self._dataset)):
            # Without the epoch: the digest is that of the data, whenever a process computes it.
            seed_generators(derive_seed("digest", self._seed, index))
            # Returned rather than raised, as in `_read_shard`: DataLoader would wrap the exception
            # in one of its own, and the user would not learn which sample it was.
            try:
                digests.append(digest_of(self._dataset[index]))
            except Exception as error:
                return _bad(index, epoch, error)
        return join_digests(len(self._dataset), digests)

    def _read_shard(self, request: Request, indices: list[int]) -> Any:
        if type(self._dataset) is TensorDataset and self._collate is None:
            # Nothing random, and nothing that can fail: all rows are gathered at once into the list
            # that default_collate would make. A subclass may override how items are read.
            return [tensor[indices] for tensor in self._dataset.tensors]
        samples, seed, epoch, loader = [], self._seed, request.epoch, request.loader
        # Each sample has a seed of its own, so that its augmentation depends neither on the worker
        # that reads it nor on the samples that were read before it.
        for index in indices:
            seed_generators(loader_seed("sample", seed, epoch, index, loader=loader))
            try:
                samples.append(self._dataset[index])
            except Exception as error:
                return _bad(index, epoch, error)
        # Collating may be random, too (mixup). The first index identifies the shard: within an
        # epoch no other shard has it.
        seed_generators(loader_seed("collate", seed, epoch, indices[0], loader=loader))
        return (self._collate or default_collate)(samples)


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


class Tied:
    """Ties a worker process to the process that it reads for: it ends with it, and has its dtype.

    A worker that is not forked starts with PyTorch's own default dtype, and would draw other random
    numbers than ``workers=0`` does.

    Note: the parent is a thread
    ----------------------------
    When the kernel kills a process with its parent, the parent is the thread that created the
    process. If that thread may end before the process does, nothing is asked of the kernel, and
    PyTorch's workers are left to notice the end by themselves. A fork server is the parent of the
    processes that it creates, and ends with the process that it serves.
    """

    def __init__(self) -> None:
        # Noted in the process that is read for, and forked or pickled into its workers.
        self._parent = os.getpid()
        self._lasting = threading.current_thread() is threading.main_thread()
        self._served = multiprocessing.get_start_method() == "forkserver"
        self._dtype = torch.get_default_dtype()

    def __call__(self, worker: int) -> None:
        torch.set_default_dtype(self._dtype)
        if self._lasting:
            # The parent of a worker that a fork server made is the server, whatever its number is.
            die_with_parent(os.getppid() if self._served else self._parent)
        # The fork happened inside `ctrl_c_later`, whose handler nobody in here will ever undo.
        ctrl_c_as_before()


def _bad(index: int, epoch: int, error: Exception) -> BadSample:
    trace = "".join(traceback.format_exception(error))
    return BadSample(index, epoch, type(error).__name__, str(error), trace)


def as_it_is(answer: Any) -> Any:
    # DataLoader's default would turn NumPy arrays into tensors. No lambda: a worker that is not
    # forked gets it pickled.
    return answer
