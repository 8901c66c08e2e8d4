"""Reads a data set in shards: the same samples in the same order with the same augmentation, on any
number of devices and with any number of worker processes."""

from __future__ import annotations

import hashlib
import os
import traceback
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Protocol, cast

import torch
from torch.utils.data import (
    DataLoader,
    Dataset,
    IterableDataset,
    Sampler,
    TensorDataset,
    default_collate,
)

from onefold.batch import ShardedBatch
from onefold.errors import SampleError
from onefold.position import LoaderSize, LoaderTrack
from onefold.process import die_with_parent
from onefold.randomness import (
    derive_seed,
    kept_generators,
    order_by_length,
    sample_order,
    seed_generators,
)
from onefold.shard import Plan, cut_bounds
from onefold.timing import host_now_s

__all__ = ["Collate", "Loader", "SizedDataset"]

Collate = Callable[[list[Any]], Any]
"""Makes one shard's payload from its samples."""


class SizedDataset(Protocol):
    """What a loader can read: a length, and an item for every index below it."""

    def __len__(self) -> int: ...

    def __getitem__(self, index: int, /) -> Any: ...


@dataclass(frozen=True, slots=True)
class _Request:
    """One batch to read: which samples go into which of this process's shards."""

    epoch: int
    samples: int
    stop: int
    """Samples of the pass up to the end of this batch."""
    plan: Plan
    shards: dict[int, list[int]]


@dataclass(frozen=True, slots=True)
class _BadSample:
    """A sample that could not be read, on its way to the process that will say so."""

    index: int
    epoch: int
    kind: str
    text: str
    traceback: str


class Loader:
    """Yields the batches of one pass over a data set, this process's shards of them.

    Made by ``Trainer.loader``. Every ``iter()`` is a new pass, in a new order if ``shuffle``; the
    order depends on the seed and the number of the pass alone. Each sample is read under
    generators seeded by (seed, pass, sample), so that augmentation does not depend on who reads.

    Args:
        dataset: has a length and an item for each index.
        batch_size: samples of a whole batch, over all devices.
        shuffle: visit the samples in another order in each pass.
        lengths: of every sample; those of near length come into one batch. None if of no matter.
        workers: processes that read ahead; 0 reads in this process.
        drop_last: leave out a last batch that is short.
        collate: makes a shard's payload from a list of samples; PyTorch's default if None.
        seed: of the run.
        plan: the plan now, asked for each batch.
        own: numbers of this process's devices.
        first_epoch: number of the first pass.
        pin_memory: read into memory that a GPU can fetch from by itself.
        timeout_s: the longest wait for a worker.
    """

    def __init__(
        self,
        dataset: SizedDataset,
        *,
        batch_size: int,
        shuffle: bool = False,
        lengths: Sequence[int] | None = None,
        workers: int = 0,
        drop_last: bool = False,
        collate: Collate | None = None,
        seed: int,
        plan: Callable[[], Plan],
        own: Sequence[int],
        first_epoch: int,
        pin_memory: bool,
        timeout_s: float,
    ) -> None:
        _check_dataset(dataset)
        _check_count("batch_size", batch_size, least=1)
        _check_count("workers", workers, least=0)
        if collate is not None and not callable(collate):
            raise TypeError(f"expected collate to be a function of a list of samples: {collate!r}")
        self._reader = _Reader(dataset, collate, seed)
        by_length = None if lengths is None else _checked_lengths(lengths, len(dataset), shuffle)
        size = LoaderSize(
            samples=len(dataset),
            batch_size=batch_size,
            drop_last=drop_last,
            shuffle=shuffle,
            lengths="" if by_length is None else _digest(by_length),
        )
        self.track = LoaderTrack(size, first_epoch)
        """Which passes were gone through."""
        self._requests = _Requests(size, by_length, seed=seed, plan=plan, own=own)
        self._workers: DataLoader[Any] | None = None
        if workers:
            self._workers = DataLoader(
                self._reader,
                batch_size=None,
                sampler=self._requests,
                num_workers=workers,
                collate_fn=_as_it_is,
                worker_init_fn=_Tied(os.getpid()),
                persistent_workers=True,
                pin_memory=pin_memory,
                timeout=timeout_s,
                generator=torch.Generator().manual_seed(0),  # or it would draw from the caller's
            )

    def __len__(self) -> int:
        """Batches of a pass."""
        return len(self._requests)

    def __iter__(self) -> Iterator[ShardedBatch]:
        """Begin a pass.

        Raises:
            SampleError: a sample could not be read.
        """
        this = self.track.begin()
        self._requests.position = this.number, this.used, this.end
        answers = self._read() if self._workers is None else iter(self._workers)
        start = host_now_s()
        try:
            for request, payloads in answers:
                this.given = request.stop
                yield ShardedBatch(
                    request.samples,
                    request.plan,
                    _checked(payloads),
                    request.epoch,
                    (start, host_now_s()),
                    this,
                    request.stop,
                )
                start = host_now_s()
        except GeneratorExit:
            self.track.end(this, broken_off=True)
            raise
        self.track.end(this, broken_off=False)

    def _read(self) -> Iterator[tuple[_Request, dict[int, Any] | _BadSample]]:
        for request in self._requests:
            with kept_generators():
                answer = self._reader[request]
            yield answer


class _Requests(Sampler[_Request]):
    """What is to be read in a pass; ``position`` says which, and from where on.

    It knows nothing of the loader: in a cycle of references the worker processes would be told of
    their end too late.
    """

    def __init__(
        self,
        size: LoaderSize,
        lengths: torch.Tensor | None,
        *,
        seed: int,
        plan: Callable[[], Plan],
        own: Sequence[int],
    ) -> None:
        self._size = size
        self._lengths = lengths
        self._seed = seed
        self._plan = plan
        self._own = own
        self.position = 0, 0, 0
        """Number of the next pass, and between which of its samples."""

    def __len__(self) -> int:
        whole, rest = divmod(self._size.samples, self._size.batch_size)
        return whole + (1 if rest and not self._size.drop_last else 0)

    def __iter__(self) -> Iterator[_Request]:
        (number, first, last), size = self.position, self._size
        order = self._order(number)
        for start in range(first, last, size.batch_size):
            stop = min(start + size.batch_size, last)
            yield self._request(number, order[start:stop], stop)

    def _order(self, epoch: int) -> torch.Tensor:  # (samples,) int64
        size, seed = self._size, self._seed
        if not size.shuffle:
            return torch.arange(size.samples)
        if self._lengths is None:
            return sample_order(size.samples, seed=seed, epoch=epoch)
        return order_by_length(self._lengths, batch_size=size.batch_size, seed=seed, epoch=epoch)

    def _request(self, epoch: int, batch: torch.Tensor, stop: int) -> _Request:
        plan = self._plan()
        bounds = cut_bounds(len(batch), plan.shards)
        shards = {
            shard: batch[bounds[shard][0] : bounds[shard][1]].tolist()
            for device in self._own
            for shard in plan.shards_of(device)
            if bounds[shard][0] < bounds[shard][1]
        }
        return _Request(epoch, len(batch), stop, plan, shards)


class _Reader(Dataset[Any]):
    """Reads what a request asks for; lives in every worker process."""

    def __init__(self, dataset: SizedDataset, collate: Collate | None, seed: int) -> None:
        self._dataset = dataset
        self._collate = collate
        self._seed = seed

    def __getitem__(self, request: _Request) -> tuple[_Request, dict[int, Any] | _BadSample]:
        payloads = {}
        for shard, indices in request.shards.items():
            payload = self._read_shard(request.epoch, indices)
            if isinstance(payload, _BadSample):
                return request, payload
            payloads[shard] = payload
        return request, payloads

    def _read_shard(self, epoch: int, indices: list[int]) -> Any:
        if type(self._dataset) is TensorDataset and self._collate is None:
            # Nothing random and nothing that can fail: the rows at once, as default_collate's list.
            return [tensor[indices] for tensor in self._dataset.tensors]
        samples = []
        for index in indices:
            seed_generators(derive_seed("sample", self._seed, epoch, index))
            try:
                samples.append(self._dataset[index])
            except Exception as error:
                return _bad(index, epoch, error)
        seed_generators(derive_seed("collate", self._seed, epoch, indices[0]))
        return (self._collate or default_collate)(samples)


class _Tied:
    """Ends a worker process with the process that it reads for."""

    def __init__(self, parent: int) -> None:
        self._parent = parent

    def __call__(self, worker: int) -> None:
        die_with_parent(self._parent)


def _bad(index: int, epoch: int, error: Exception) -> _BadSample:
    trace = "".join(traceback.format_exception(error))
    return _BadSample(index, epoch, type(error).__name__, str(error), trace)


def _checked(payloads: dict[int, Any] | _BadSample) -> dict[int, Any]:
    if isinstance(payloads, _BadSample):
        # Made elsewhere: a frame that holds its own exception would keep the workers alive.
        raise _sample_error(payloads)
    return payloads


def _sample_error(bad: _BadSample) -> SampleError:
    error = SampleError(
        f"reading sample {bad.index} in epoch {bad.epoch} failed: {bad.kind}: {bad.text}"
    )
    error.add_note(f"Where it happened:\n{bad.traceback}")
    return error


def _as_it_is(answer: Any) -> Any:
    return answer


def _check_dataset(dataset: object) -> None:
    indexed = hasattr(dataset, "__len__") and hasattr(dataset, "__getitem__")
    if not indexed or isinstance(dataset, IterableDataset):
        raise TypeError(
            f"expected a data set with a length and an item for each index, got "
            f"{type(dataset).__name__}. Samples are dealt out by number, so a stream cannot be "
            f"read; give it an index, or call trainer.step with whole batches of your own"
        )
    if len(cast(SizedDataset, dataset)) == 0:
        raise ValueError("the data set is empty: expected at least one sample")


def _checked_lengths(lengths: Sequence[int], samples: int, shuffle: bool) -> torch.Tensor:
    if not shuffle:
        raise ValueError("batches by length are made of shuffled samples: expected shuffle=True")
    if len(lengths) != samples:
        raise ValueError(
            f"expected one length for each of the {samples} samples, got {len(lengths)} lengths"
        )
    return torch.as_tensor(lengths).to(torch.int64)


def _digest(lengths: torch.Tensor) -> str:
    return hashlib.blake2b(lengths.numpy().tobytes(), digest_size=8).hexdigest()


def _check_count(name: str, value: int, *, least: int) -> None:
    if isinstance(value, bool) or not isinstance(value, int):
        raise TypeError(f"expected {name} to be a whole number, got {value!r}")
    if value < least:
        raise ValueError(f"expected {name} of at least {least}, got {value}")
