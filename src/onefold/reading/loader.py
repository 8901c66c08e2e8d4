"""Reads a data set in shards: the same samples, order and augmentation on any number of devices.

Note: who keeps the workers alive
---------------------------------
PyTorch ends the worker processes of a pass when the pass's iterator is destroyed, in a destructor.
So whatever refers to the iterator decides when the processes end: a frame that an exception keeps,
or a cycle of references, would keep them until the garbage collector comes along. That is why the
iterator is deleted by name when a pass is left, why the requests know nothing of the loader, and
why errors are raised in functions that do not hold the iterator.
"""

from __future__ import annotations

import hashlib
import os
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any, cast

import torch
from torch.multiprocessing import get_sharing_strategy
from torch.utils.data import (
    DataLoader,
    IterableDataset,
)

from onefold.core.batch import DataPass, ShardedBatch
from onefold.core.numbers import check_whole
from onefold.core.randomness import (
    kept_generators,
    order_by_length,
    sample_order,
)
from onefold.core.shard import Plan, cut_bounds
from onefold.errors import SampleError
from onefold.reading.position import LoaderSize, LoaderTrack
from onefold.reading.reader import (
    Answer,
    BadSample,
    Collate,
    Reader,
    Request,
    SizedDataset,
    Tied,
    as_it_is,
    one_thread,
)
from onefold.system.interrupt import ctrl_c_later
from onefold.watch.timing import host_now_s

__all__ = ["Loader"]

# In bytes: the room in the address of a Unix socket, less what multiprocessing appends to the path
# of the temporary folder.
_LONGEST_TEMPORARY_PATH = 107 - len("/pymp-12345678/listener-12345678")


class Loader:
    """Yields the batches of a data set, pass after pass: of each, the shards of this process.

    It is made by ``Trainer.loader``. Every ``iter()`` begins a new pass, in a new order if
    ``shuffle`` is set; the order depends only on the seed and the numbers of the pass and the
    loader. Before each sample is read, the generators are seeded from these and its index, so that
    augmentation does not depend on which process reads. Worker processes are started for each
    pass, with the data set as it is at that time.

    Args:
        dataset: an object with a length and an item for each index.
        batch_size: number of samples in a whole batch, over all devices.
        shuffle: visit the samples in a different order in each pass.
        lengths: the length of every sample, to put samples of similar length into one batch; None
            to ignore lengths.
        workers: number of processes that read ahead; 0 reads in this process.
        drop_last: leave out the last batch if it is short.
        collate: makes a shard's payload from a list of samples; PyTorch's default if None.
        seed: seed of the run.
        plan: returns the current plan; called when a batch is handed out, whenever it was read.
        own: numbers of this process's devices.
        first_epoch: number of the first pass.
        pin_memory: read into page-locked memory, from which a GPU copies on its own.
        timeout_s: the longest wait for a worker.
        digest: read a few more samples per pass, by which processes notice that their data differ.
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
        digest: bool = False,
    ) -> None:
        _check_dataset(dataset)
        check_whole("batch_size", batch_size, least=1)
        check_whole("workers", workers, least=0)
        if workers:
            _check_temporary_path(workers)
        if collate is not None and not callable(collate):
            raise TypeError(f"expected collate to be a function of a list of samples: {collate!r}")
        self._reader = Reader(dataset, collate, seed)
        by_length = None if lengths is None else _checked_lengths(lengths, len(dataset), shuffle)
        size = LoaderSize(
            samples=len(dataset),
            batch_size=batch_size,
            drop_last=drop_last,
            shuffle=shuffle,
            lengths="" if by_length is None else _digest(by_length),
        )
        self.track = LoaderTrack(size, first_epoch)
        """Which passes the loader has been through."""
        self._by_length = by_length
        self._seed = seed
        self._plan = plan
        self._own = tuple(own)
        self._workers = workers
        self._pin_memory = pin_memory
        self._timeout_s = timeout_s
        self._wants_digest = digest
        self._data_digest = 0

    def __len__(self) -> int:
        """Number of batches in a pass."""
        size = self.track.size
        whole, rest = divmod(size.samples, size.batch_size)
        return whole + (1 if rest and not size.drop_last else 0)

    def __iter__(self) -> Iterator[ShardedBatch]:
        """Begin a new pass.

        Raises:
            SampleError: a sample could not be read, or no worker delivered one within the timeout.
        """
        this = self.track.begin()
        try:
            if this.given < this.end:
                yield from self._batches(this)
        except GeneratorExit:
            # The script has left its loop by `break` or an exception, and dropped the iterator.
            self.track.end(this, broken_off=True)
            raise
        self.track.end(this, broken_off=False)

    def _batches(self, this: DataPass) -> Iterator[ShardedBatch]:
        start, process = host_now_s(), os.getpid()
        requests = self._requests(this)
        # Workers are forked in here, where Ctrl-C would be lost: see `onefold.system.interrupt`.
        with ctrl_c_later():
            answers = self._answers(requests)
        try:
            while this.given < this.end:
                # The plan first, then the answer: see the note on plans that change.
                requests.follow(self._plan(), this.given)
                request, payloads, digest = self._next(answers)
                # The very first answer carries the digest, even if its batch is dropped below.
                self._data_digest = digest or self._data_digest
                # Dropped: batches that were read ahead for the previous plan.
                while request.turn != requests.turn:
                    request, payloads, _ = self._next(answers)
                # Before the yield: the script may never come back for the next batch.
                this.given = request.stop
                yield ShardedBatch(
                    request.samples,
                    request.plan,
                    _checked(payloads),
                    request.epoch,
                    (start, host_now_s()),
                    this,
                    request.stop,
                    request.loader,
                    self._data_digest,
                    request.shards,
                )
                # The wait for the next batch begins when the script asks for it.
                start = host_now_s()
        finally:
            # In a child that the script forked inside its loop, this iterator is only a copy.
            if os.getpid() != process:
                _disown(answers)
            # An exception keeps this frame, and would keep the worker processes with it. Ending
            # them happens in a destructor, where Ctrl-C would be lost.
            with ctrl_c_later():
                del answers

    def _next(self, answers: Iterator[Answer]) -> Answer:
        began = time.monotonic()
        try:
            return next(answers)
        except RuntimeError as error:
            # DataLoader raises the same class for a timeout and for whatever else goes wrong, and a
            # collate function may raise it as well: so the text and the time must both fit.
            late = time.monotonic() - began >= self._timeout_s and "timed out" in str(error)
            if not self._workers or not late:
                raise
            raise SampleError(
                f"the loader's workers gave nothing within {self._timeout_s:g} s: expected a "
                f"batch. Reading takes longer (raise timeout_s of Trainer, or onefold run "
                f"--timeout), or what a worker had read could not be sent, which it has reported "
                f"above; with workers=0 this process reads"
            ) from error

    def _requests(self, this: DataPass) -> _Requests:
        return _Requests(
            this,
            self._order(this.number),
            batch_size=self.track.size.batch_size,
            loader=self.track.number,
            plan=self._plan(),
            own=self._own,
            digest=self._wants_digest,
        )

    def _order(self, epoch: int) -> torch.Tensor:  # (samples,) int64
        # A function of (seed, epoch, loader) alone: a resumed run computes it again.
        size, seed, loader = self.track.size, self._seed, self.track.number
        if not size.shuffle:
            return torch.arange(size.samples)
        if self._by_length is None:
            return sample_order(size.samples, seed=seed, epoch=epoch, loader=loader)
        return order_by_length(
            self._by_length, batch_size=size.batch_size, seed=seed, epoch=epoch, loader=loader
        )

    def _answers(self, requests: _Requests) -> Iterator[Answer]:
        if not self._workers:
            return self._read(requests)
        return iter(
            DataLoader(
                self._reader,
                # Requests are whole batches already.
                batch_size=None,
                sampler=requests,
                num_workers=self._workers,
                collate_fn=as_it_is,
                worker_init_fn=Tied(),
                # Persistent workers would keep the data set as it was in the first pass.
                persistent_workers=False,
                pin_memory=self._pin_memory,
                timeout=self._timeout_s,
                # Without one, DataLoader would draw a seed from the caller's generator.
                generator=torch.Generator().manual_seed(0),
            )
        )

    def _read(self, requests: _Requests) -> Iterator[Answer]:
        for request in requests:
            # The yield stays outside: generators and threads must be the caller's again by then.
            with kept_generators(), one_thread():
                answer = self._reader[request]
            yield answer


class _Requests:
    """The batches of a pass that are to be read, one after the other; starts over if plans change.

    Note: a plan that changes while workers read ahead
    --------------------------------------------------
    A batch has the plan of the moment at which it is handed out, so that devices agree however far
    ahead each of them reads. If the plan has changed, the requests go back to the first batch that
    was not handed out, and the loader drops the answers to requests of an earlier turn. DataLoader
    draws another request for each answer that it receives, even if there was none left before: so
    ``__next__`` may continue after it has raised StopIteration.

    It does not refer to the loader: see the note on who keeps the workers alive.
    """

    def __init__(
        self,
        this: DataPass,
        order: torch.Tensor,  # (samples,) int64
        *,
        batch_size: int,
        loader: int,
        plan: Plan,
        own: Sequence[int],
        digest: bool,
    ) -> None:
        self.turn = 0
        """How often the plan has changed during this pass."""
        self._epoch, self._next, self._end = this.number, this.given, this.end
        self._order = order
        self._batch_size = batch_size
        self._loader = loader
        self._plan = plan
        self._own = own
        self._digest = digest

    def __iter__(self) -> _Requests:
        return self

    def __next__(self) -> Request:
        if self._next >= self._end:
            raise StopIteration
        start, self._next = self._next, min(self._next + self._batch_size, self._end)
        return self._request(self._order[start : self._next])

    def follow(self, plan: Plan, start: int) -> None:
        """Go back to sample ``start`` of the pass if the plan has changed."""
        # The identity first: it settles nearly every step without comparing the counts.
        if plan is not self._plan and plan != self._plan:
            self.turn += 1
            self._plan, self._next = plan, start

    def _request(self, batch: torch.Tensor) -> Request:
        plan = self._plan
        bounds = cut_bounds(len(batch), plan.shards)
        # Lists of numbers, which cost less to send to a worker than tensors, each a file
        # descriptor.
        shards = {
            shard: batch[bounds[shard][0] : bounds[shard][1]].tolist()
            for device in self._own
            for shard in plan.shards_of(device)
            if bounds[shard][0] < bounds[shard][1]
        }
        # Only the first request of a pass asks for the digest.
        digest, self._digest = self._digest, False
        return Request(
            self._loader, self._epoch, len(batch), self._next, plan, self.turn, digest, shards
        )


def _check_temporary_path(workers: int) -> None:
    """Refuse a temporary folder whose path is too long for the sockets of worker processes.

    In a worker this would fail in a thread of its queue, and the answer would simply never arrive.
    """
    folder = os.fsencode(tempfile.gettempdir())
    by_socket = get_sharing_strategy() == "file_descriptor"  # type: ignore[no-untyped-call]
    if by_socket and len(folder) > _LONGEST_TEMPORARY_PATH:
        raise ValueError(
            f"workers={workers}: worker processes send tensors through sockets in the temporary "
            f"folder, so expected its path to have at most {_LONGEST_TEMPORARY_PATH} bytes, got "
            f"{len(folder)}: {os.fsdecode(folder)}; set TMPDIR to a shorter path, or use workers=0"
        )


def _disown(answers: Iterator[Answer]) -> None:
    """Let go of the workers in a forked child that leaves the pass: they still read for its parent.

    PyTorch ends them when the iterator is destroyed, whichever process destroys it.
    """
    # DataLoader's own mark for an iterator whose workers have been ended already. An iterator of
    # ours, without workers, has nothing to let go of.
    if hasattr(answers, "_shutdown"):
        answers._shutdown = True


def _checked(payloads: dict[int, Any] | BadSample) -> dict[int, Any]:
    if isinstance(payloads, BadSample):
        # Made in a function of its own: a frame that holds its exception is a cycle of references,
        # and would keep the workers alive.
        raise _sample_error(payloads)
    return payloads


def _sample_error(bad: BadSample) -> SampleError:
    error = SampleError(
        f"reading sample {bad.index} in epoch {bad.epoch} failed: {bad.kind}: {bad.text}"
    )
    # As a note: the traceback of another process cannot be chained to this one's.
    error.add_note(f"Where it happened:\n{bad.traceback}")
    return error


def _check_dataset(dataset: object) -> None:
    # An IterableDataset may inherit or define both methods, and still be read as a stream.
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
