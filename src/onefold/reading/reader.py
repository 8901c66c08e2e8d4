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
    """What a loader can read: a length, and an item for every index below it."""

    def __len__(self) -> int: ...

    def __getitem__(self, index: int, /) -> Any: ...


@dataclass(frozen=True, slots=True)
class Request:
    """One batch to read: which samples go into which of this process's shards."""

    loader: int
    epoch: int
    samples: int
    stop: int
    """Samples of the pass up to the end of this batch."""
    plan: Plan
    turn: int
    """How often the plan had changed in the pass when this was asked for."""
    digest: bool
    """Whether the digest of the data set is wanted as well."""
    shards: dict[int, list[int]]


@dataclass(frozen=True, slots=True)
class BadSample:
    """A sample that could not be read, on its way to the process that will say so."""

    index: int
    epoch: int
    kind: str
    text: str
    traceback: str


Answer = tuple[Request, dict[int, Any] | BadSample, int]
"""What was asked for, each shard's payload, and the digest of the data set where it was wanted."""


class Reader(Dataset[Any]):
    """Reads what a request asks for; lives in every worker process."""

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
            seed_generators(derive_seed("digest", self._seed, index))
            try:
                digests.append(digest_of(self._dataset[index]))
            except Exception as error:
                return _bad(index, epoch, error)
        return join_digests(len(self._dataset), digests)

    def _read_shard(self, request: Request, indices: list[int]) -> Any:
        if type(self._dataset) is TensorDataset and self._collate is None:
            # Nothing random and nothing that can fail: the rows at once, as default_collate's list.
            return [tensor[indices] for tensor in self._dataset.tensors]
        samples, seed, epoch, loader = [], self._seed, request.epoch, request.loader
        for index in indices:
            seed_generators(loader_seed("sample", seed, epoch, index, loader=loader))
            try:
                samples.append(self._dataset[index])
            except Exception as error:
                return _bad(index, epoch, error)
        seed_generators(loader_seed("collate", seed, epoch, indices[0], loader=loader))
        return (self._collate or default_collate)(samples)


@contextmanager
def one_thread() -> Iterator[None]:
    """As PyTorch's worker processes read: the bits of a sum depend on the number of threads."""
    before = torch.get_num_threads()
    if before == 1:
        yield
        return
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(before)


class Tied:
    """Ends a worker process with the process that it reads for, and gives it that one's dtype.

    A worker that is not forked begins with PyTorch's own default dtype, and would draw other
    numbers than ``workers=0``.

    What the kernel takes for the parent is the thread that has made the worker: where that may end
    before the process, it is left to PyTorch's workers to notice the end by themselves. A fork
    server is the parent of those that it makes, and ends with the process that it serves.
    """

    def __init__(self) -> None:
        self._parent = os.getpid()
        self._lasting = threading.current_thread() is threading.main_thread()
        self._served = multiprocessing.get_start_method() == "forkserver"
        self._dtype = torch.get_default_dtype()

    def __call__(self, worker: int) -> None:
        torch.set_default_dtype(self._dtype)
        if self._lasting:
            die_with_parent(os.getppid() if self._served else self._parent)
        ctrl_c_as_before()


def _bad(index: int, epoch: int, error: Exception) -> BadSample:
    trace = "".join(traceback.format_exception(error))
    return BadSample(index, epoch, type(error).__name__, str(error), trace)


def as_it_is(answer: Any) -> Any:
    return answer
