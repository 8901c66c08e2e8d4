"""Loads a data set in shards, with the same order and augmentation on any number of devices.

`source_of` decides how a data set is read.

Note: who keeps the workers alive
---------------------------------
PyTorch ends a pass's worker processes in the destructor of its iterator. Any reference to the
iterator therefore keeps the processes alive: a frame that an exception stores, or a reference
cycle, would do so until the next garbage collection. For that reason the iterator is deleted
explicitly at the end of a pass, the requests do not refer to the loader, and errors are raised in
functions that do not hold the iterator.
"""

from __future__ import annotations

import logging
import os
import time
from collections.abc import Callable, Generator, Iterable, Iterator, Sequence
from contextlib import suppress
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Any, TypedDict, Unpack

from torch.utils.data import DataLoader

from onefold.core.batch import DataPass, ShardedBatch
from onefold.core.late import load
from onefold.core.shard import Shares
from onefold.data_order.indexed import Choices, FunctionBatches, Indexed, Items
from onefold.data_order.order import Order, Requests, Workers, disown
from onefold.data_order.position import LoaderTrack
from onefold.data_order.reader import Answer, BadSample, Collate, SizedDataset, is_stream
from onefold.errors import CheckpointError, SampleError
from onefold.system.process import ctrl_c_later
from onefold.watch.timing import host_now_s

if TYPE_CHECKING:
    from onefold.data_order.stream import Stream

__all__ = ["DataSource", "Loader", "TorchNames", "choose"]


_log = logging.getLogger("onefold")

_OF_A_STREAM = 10_000
"""Number of repeated batches in a pass whose length is unknown."""

_USED_BEFORE = (
    "this pass was used before the run was saved, so it is empty, and the next one may be too. To "
    "iterate over a loader endlessly, use itertools.chain.from_iterable(itertools.repeat(loader))"
)


class Loader:
    """Yields the batches of a data set, pass after pass, with this process's shards of each batch.

    Created by ``Trainer.loader`` and ``Trainer.batches``, see `Trainer.loader`. Every ``iter()``
    starts a new pass, in a new order if ``shuffle`` is set. The order depends only on the seed and
    on the numbers of the pass and the loader. Before each sample is read, the generators are seeded
    from these and the sample's index, so that augmentation does not depend on the process that
    reads. Worker processes are started for each pass, with a copy of the data set at that time.

    Args:
        dataset: a map-style data set, a stream, or whole batches (`Items`, `FunctionBatches`).
        workers: number of worker processes, or `Workers`; 0 reads in this process.
        collate: makes a shard's payload from a list of samples; PyTorch's default if None.
        seed: the run's seed.
        shares: returns the current shares; called when a batch is yielded, even if the batch was
            prefetched.
        own: returns the numbers of this process's devices; called at the same time.
        first_epoch: number of the first pass.
        pin_memory: whether to read into page-locked memory, for asynchronous copies to a GPU.
        timeout_s: maximum wait for a worker, in seconds.
        gather: gathers the payloads of all shards of a batch on every device.
        repeats: returns whether passes yield the last batch again and again, without reading.
        choices: order of the samples and size of the batches.
    """

    def __init__(
        self,
        dataset: Any,
        *,
        workers: int | Workers = 0,
        collate: Collate | None = None,
        seed: int,
        shares: Callable[[], Shares],
        own: Callable[[], Sequence[int]],
        first_epoch: int,
        pin_memory: bool,
        timeout_s: float,
        gather: Callable[[ShardedBatch], Any] | None = None,
        repeats: Callable[[], bool] | None = None,
        **choices: Unpack[Choices],
    ) -> None:
        if collate is not None and not callable(collate):
            raise TypeError(f"expected collate to be a function of a list of samples: {collate!r}")
        self._workers = workers if isinstance(workers, Workers) else Workers(number=workers)
        self.source = source_of(dataset, collate, seed, self._workers, choices)
        """Determines how the data set is read; a tool may wrap it before the first pass."""
        self.dataset = self.source.dataset
        """The data set, stream or function that provides the batches."""
        self.batch_size = choices.get("batch_size")
        """Global batch size, in samples; None if batches differ in size."""
        self.track = LoaderTrack(self.source.size, first_epoch)
        """The loader's passes, for checkpoints."""
        self._shares, self._own, self._gather = shares, own, gather
        self._repeats = repeats
        self._last: ShardedBatch | None = None
        self.note_reading: Callable[[bool], None] = lambda reads: None
        """Called with True before each wait for a batch, and with False after it."""
        self._pin_memory = pin_memory
        self._timeout_s = timeout_s
        self._data_digest = 0
        self._had_samples = self._has_checked = False
        self._warned = False

    @property
    def workers(self) -> int:
        """Number of worker processes of this process, which affects no bits and may be changed.

        A change takes effect in the next pass. A pass that reads samples by index without workers
        starts them for its next batch.

        Raises:
            ValueError: a stream would have several, or the number is below 0.
        """
        return self._workers.number

    @workers.setter
    def workers(self, number: int) -> None:
        if not self.track.size.samples:
            load("data_order.stream").check_workers(self.dataset, number)
        self._workers = replace(self._workers, number=number)

    def __repr__(self) -> str:
        return f"Loader({type(self.dataset).__name__}, batch_size={self.batch_size})"

    def __len__(self) -> int:
        """Return the number of batches in a pass; TypeError if a stream has no length."""
        return self.source.batches()

    def __iter__(self) -> Generator[ShardedBatch, None, str]:
        """Start a new pass.

        Raises:
            TypeError: ``collate`` returned nothing.
            SampleError: reading a sample failed, no worker sent one within the timeout, or a stream
                that had samples has none.
            CheckpointError: a sampler's order differs from the saved run.
        """
        with ctrl_c_later():
            this = self.track.start_pass()
        used = this.given
        try:
            if this.given < this.end:
                yield from self._repeated(this, 0) if self._is_repeating() else self._batches(this)
        except GeneratorExit:
            # The script left its loop by `break` or an exception, and dropped the iterator.
            self.track.end(this, broken_off=True)
            raise
        if not this.given:
            self._warn_of_nothing(this)
        self.track.end(this, broken_off=False)
        # The value of an uncaught StopIteration, if the script calls `next`; a loop ignores it.
        return _USED_BEFORE if 0 < this.given <= used else ""

    def _batches(self, this: DataPass) -> Iterator[ShardedBatch]:
        order = self._order(this)
        if self.source.skips:
            yield from self._unread(this, order)
        # Check after the replay, which may use up the pass.
        if this.given >= this.end:
            return
        start, process, handed = host_now_s(), os.getpid(), 0
        requests = self._requests(this, order)
        reader = self.source.reader(this, self.track)
        workers, answers = self._workers, self._answers(reader, requests)
        try:
            while this.given < this.end:
                # Without workers no request is ahead. A stream cannot continue elsewhere.
                if workers is not self._workers and not workers.number and self.track.size.samples:
                    workers, answers = self._workers, self._answers(reader, requests)
                # Get the shares before the answer: see the note on shares that change.
                requests.follow(self._shares(), self._own(), this.given)
                answer = self._next(answers)
                # Drop batches that were prefetched for the previous shares.
                while answer.request.turn != requests.turn:
                    answer = self._next(answers)
                payloads = _checked(answer.payloads)
                if answer.over:
                    self._check_not_exhausted(this)
                    this.end = this.given
                    self.track.note_length(this.given, self._shares().devices)
                    break
                self._had_samples = True
                # Record this before the yield: the script may never request the next batch.
                _handed_out(answer, this)
                batch = self._batch(answer, payloads, this, start)
                self._last = batch if self._repeats else None
                yield batch
                handed += 1
                if self._is_repeating():
                    yield from self._repeated(this, handed)
                    break
                # Start timing the wait when the script requests the next batch.
                start = host_now_s()
        finally:
            # In a child process forked inside the script's loop, this iterator is only a copy.
            if os.getpid() != process:
                disown(answers)
            # An exception keeps this frame, and thereby the worker processes. The destructor of
            # `answers` ends them; it runs here, because it would lose Ctrl-C.
            with ctrl_c_later():
                del answers

    def _answers(self, reader: Any, requests: Requests) -> Iterator[Answer]:
        # Workers are forked here, where Ctrl-C would be lost: see `onefold.system.process`.
        with ctrl_c_later():
            return self._workers.answers(
                reader, requests, pin_memory=self._pin_memory, timeout_s=self._timeout_s
            )

    def _batch(
        self, answer: Answer, payloads: dict[int, Any], this: DataPass, start: float
    ) -> ShardedBatch:
        request = answer.request
        return ShardedBatch(
            request.samples,
            request.shares,
            payloads,
            request.epoch,
            (start, host_now_s()),
            this,
            request.stop,
            request.loader,
            self._data_digest,
            request.shards,
            others=answer.others,
            gather=self._gather,
        )

    def _is_repeating(self) -> bool:
        return self._last is not None and self._repeats is not None and self._repeats()

    def _repeated(self, this: DataPass, handed: int) -> Iterator[ShardedBatch]:
        """Yield the last batch until the pass has its number of batches."""
        assert self._last is not None
        batches = _OF_A_STREAM
        with suppress(TypeError):
            batches = len(self)
        for _ in range(batches - handed):
            yield replace(self._last)
        this.given = this.end

    def _warn_of_nothing(self, this: DataPass) -> None:
        """Warn, once and on one device, that a pass was empty."""
        if self._warned or 0 not in self._own():
            return
        self._warned = True
        size = self.track.size
        dropped = f" of {size.batch_size} samples, with drop_last=True" if size.drop_last else ""
        _log.warning(
            "pass %d of a loader of %s had no batch%s, so a loop over it trains nothing",
            this.number,
            size.kind or "samples by number",
            dropped,
        )

    def _check_not_exhausted(self, this: DataPass) -> None:
        # Without this error, a loop over an empty pass would silently stop training.
        if self._had_samples and not this.given:
            raise SampleError(
                f"{self.track.size.kind} yielded no samples in epoch {this.number}, but did in an "
                f"earlier pass. Pass an iterable that restarts on every iter(), not an iterator: "
                f"the object that creates the iterator, or a class whose __iter__ does"
            )

    def _next(self, answers: Iterator[Answer]) -> Answer:
        began = time.monotonic()
        self.note_reading(True)
        try:
            answer = next(answers)
        except RuntimeError as error:
            # DataLoader raises RuntimeError for a timeout and for other failures, and so may a
            # collate function. Check both the text and the time.
            late = time.monotonic() - began >= self._timeout_s and "timed out" in str(error)
            if not self._workers.number or not late:
                raise
            raise load("data_order.worker_processes").no_batch(self._timeout_s) from error
        finally:
            self.note_reading(False)
        # The first answer carries the digest, even if its batch is dropped.
        self._data_digest = answer.digest or self._data_digest
        return answer

    def _unread(self, this: DataPass, order: Order) -> Iterator[ShardedBatch]:
        """Yield batches without reading their samples while the script replays completed steps.

        A batch that the script keeps for later is read when it is used.
        """
        position = self.track.position
        while position is not None and position.replaying() and this.given < this.end:
            start = this.given
            found = position.next_batch(self.track.number, this.number, start)
            if found is None and order.indices is None:
                this.end = start  # a stream, which ended there
                return
            stop = order.stop(start)
            samples = stop - start
            # Otherwise the script skipped this batch, and used a later one.
            if found is not None and found[0] <= stop:
                stop, samples = found
            this.given = stop
            batch = ShardedBatch(
                samples,
                self._shares(),
                {},
                this.number,
                data_pass=this,
                stop=stop,
                loader=self.track.number,
                gather=self._gather,
                unread=partial(self._read_later, this, order, start, stop),
            )
            yield batch
        this.given = min(this.given, this.end)

    def _read_later(self, this: DataPass, order: Order, start: int, stop: int) -> ShardedBatch:
        """Read a batch that was yielded without its samples."""
        began = host_now_s()
        reader = self.source.reader(replace(this, used=start), self.track)
        requests = self._requests(replace(this, given=start, end=stop), order)
        here = Workers(number=0)
        answer = next(here.answers(reader, requests, pin_memory=False, timeout_s=self._timeout_s))
        return self._batch(answer, _checked(answer.payloads), this, began)

    def _order(self, this: DataPass) -> Order:
        order = self.source.order(this, self.track.number)
        self.track.settle(this, order.length, order.digest.hex())
        return order

    def _requests(self, this: DataPass, order: Order) -> Requests:
        place = this.number, this.given, this.end
        by = self.track.number, self._shares(), self._own()
        checks, self._has_checked = not self._has_checked, True
        return Requests(*place, order, *by, checks)


def _handed_out(answer: Answer, this: DataPass) -> None:
    """Record in the pass that a batch is yielded, and the state of its stream."""
    this.given = answer.request.stop
    if answer.state is not None:
        # Drop earlier states, except the one after the last used batch.
        this.states = {place: s for place, s in this.states.items() if place >= this.used}
        this.states[this.given] = answer.state


def _checked(payloads: dict[int, Any] | BadSample) -> dict[int, Any]:
    if isinstance(payloads, BadSample):
        # Create the error in another function: a frame that holds its own exception is a reference
        # cycle, which would keep the workers alive.
        raise _sample_error(payloads)
    for shard, payload in payloads.items():
        if payload is None:
            raise TypeError(
                f"collate returned None for the samples of shard {shard}. Return the batch that "
                f"the loss expects; the function may lack a return statement"
            )
    return payloads


def _sample_error(bad: BadSample) -> SampleError | CheckpointError:
    if not bad.doing:
        return CheckpointError(bad.text)
    error = SampleError(
        f"{bad.doing} {bad.index} in epoch {bad.epoch} failed: {bad.kind}: {bad.text}"
    )
    # Add a note: the traceback of another process cannot be chained to this exception.
    if bad.traceback:
        error.add_note(f"Where it happened:\n{bad.traceback}")
    return error


def source_of(
    dataset: Any, collate: Collate | None, seed: int, workers: Workers, choices: Choices
) -> Indexed | Stream:
    """Create the source that reads a data set.

    Args:
        dataset: the user's data set; see `Loader`.
        collate: makes a shard's payload.
        seed: the run's seed.
        workers: the worker processes.
        choices: order of the samples and size of the batches.

    Raises:
        TypeError: the data set is neither map-style nor a stream.
        ValueError: the choices do not fit the data set, or each other.
    """
    if _is_loader(dataset) or not is_stream(dataset):
        if not isinstance(dataset, Items | FunctionBatches):
            _check_index(dataset)
        return Indexed(dataset, collate, seed, choices)
    made: Stream = load("data_order.stream").stream_of(
        dataset, collate, seed, workers.number, choices
    )
    return made


def _is_loader(dataset: Any) -> bool:
    return all(hasattr(dataset, name) for name in ("batch_size", "dataset", "__iter__"))


def _check_index(dataset: Any) -> None:
    if _is_loader(dataset):
        raise TypeError(
            f"expected a data set, but got a {type(dataset).__name__}, which makes batches. Pass "
            f"its dataset; trainer.loader, evaluate and predict also accept PyTorch's DataLoader"
        )
    if not (hasattr(dataset, "__len__") and hasattr(dataset, "__getitem__")):
        raise TypeError(
            f"expected a data set with a length and an item for each index, or a stream that can "
            f"be iterated repeatedly in the same order, but got {type(dataset).__name__}. An "
            f"iterator or generator has a single pass: pass the object that creates it, such as "
            f"one with __iter__. For batches that the script makes itself, use trainer.batches or "
            f"trainer.step"
        )


DataSource = SizedDataset | Iterable[Any] | DataLoader[Any]
"""A map-style data set, a stream, or a DataLoader."""


class TorchNames(TypedDict, total=False):
    """Arguments of `torch.utils.data.DataLoader` that may be used with onefold's."""

    sampler: Iterable[int] | None
    """Yields sample indices in the order of a pass; its length is the length of a pass."""
    batch_sampler: Iterable[Sequence[int]] | None
    """Yields lists of sample indices, each a global batch."""
    num_workers: int
    """Same as ``workers``."""
    collate_fn: Collate | None
    """Same as ``collate``."""
    worker_init_fn: Callable[[int], object] | None
    """Called in each worker with its number, before it reads."""


def choose(
    dataset: Any,
    names: TorchNames,
    *,
    batch_size: int | None,
    workers: int,
    collate: Collate | None,
    shuffle: bool = False,
    lengths: Sequence[int] | None = None,
    drop_last: bool = False,
    in_order: bool = False,
) -> dict[str, Any]:
    """Convert the arguments of `Trainer.loader`, `evaluate` or `predict`.

    Returns:
        Arguments of `onefold.data_order.loader.Loader`, by name.

    Args:
        dataset: a data set, a stream, or a DataLoader with its own settings.
        names: arguments under PyTorch's names.
        batch_size, workers, collate, shuffle, lengths, drop_last: arguments under onefold's names.
        in_order: visit samples in the order of the data set, even if a DataLoader would shuffle.

    Raises:
        TypeError: a name is unknown, an argument was passed under both names, or a DataLoader was
            passed with additional settings or is of an unsupported class.
    """
    unknown = names.keys() - TorchNames.__annotations__.keys()
    if unknown:
        raise TypeError(
            f"unexpected argument {', '.join(sorted(unknown))}. Use the arguments of "
            f"trainer.loader, or of PyTorch's DataLoader {', '.join(TorchNames.__annotations__)}"
        )
    if isinstance(dataset, DataLoader):
        ours = {
            "batch_size": batch_size is not None,
            "workers": workers != 0,
            "collate": collate is not None,
            "shuffle": shuffle,
            "lengths": lengths is not None,
            "drop_last": drop_last,
        }
        given = [*(name for name, is_given in ours.items() if is_given), *names]
        made: dict[str, Any]
        made = load("data_order.from_pytorch").arguments_of(dataset, given, in_order)
        return made
    if type(dataset).__name__ == "WebLoader":
        raise load("data_order.from_pytorch").of_batches(dataset)
    _once("workers", workers != 0, "num_workers", names)
    _once("collate", collate is not None, "collate_fn", names)
    batch_sampler = names.get("batch_sampler")
    if batch_size is None and batch_sampler is None:
        raise TypeError(
            "batch_size is missing: pass the global batch size, in samples; or a batch_sampler or "
            "a DataLoader, which have their own"
        )
    number = names.get("num_workers", workers)
    return {
        "dataset": dataset,
        "collate": names.get("collate_fn", collate),
        "workers": Workers(number=number, init=names.get("worker_init_fn")),
        "batch_size": batch_size,
        "sampler": names.get("sampler"),
        "batch_sampler": batch_sampler,
        "shuffle": shuffle,
        "lengths": lengths,
        "drop_last": drop_last,
    }


def _once(ours: str, is_given: bool, theirs: str, names: TorchNames) -> None:
    if is_given and theirs in names:
        raise TypeError(f"{ours} and {theirs} are the same argument: pass only one of them")
