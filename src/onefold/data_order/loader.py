"""Reads a data set in shards: the same samples, order and augmentation on any number of devices.

`source_of` decides how a data set is read.

Note: who keeps the workers alive
---------------------------------
PyTorch ends the worker processes of a pass when the pass's iterator is destroyed, in a destructor.
So whatever refers to the iterator decides when the processes end: a frame that an exception keeps,
or a cycle of references, would keep them until the garbage collector comes along. That is why the
iterator is deleted by name when a pass is left, why the requests know nothing of the loader, and
why errors are raised in functions that do not hold the iterator.
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
"""How many batches a pass without a length has that repeats one batch."""

_USED_BEFORE = (
    "this pass was used before the run was saved, so it comes empty, and the next one may as well: "
    "go through a loader again and again by itertools.chain.from_iterable(itertools.repeat(loader))"
)


class Loader:
    """Yields the batches of a data set, pass after pass: of each, the shards of this process.

    It is made by ``Trainer.loader`` and ``Trainer.batches``, see `Trainer.loader`. Every ``iter()``
    begins a new pass, in a new order if ``shuffle`` is set; the order depends only on the seed and
    the numbers of the pass and the loader. Before each sample is read, the generators are seeded
    from these and its index, so that augmentation does not depend on which process reads. Worker
    processes are started for each pass, with the data set as it is at that time.

    Args:
        dataset: an object with a length and an item for each index; or a stream, or whole batches
            (`Items`, `FunctionBatches`).
        workers: number of processes that read ahead, or `Workers`; 0 reads in this process.
        collate: makes a shard's payload from a list of samples; PyTorch's default if None.
        seed: seed of the run.
        shares: returns the current shares; called when a batch is handed out, whenever it was read.
        own: returns the numbers of this process's devices; called likewise.
        first_epoch: number of the first pass.
        pin_memory: read into page-locked memory, from which a GPU copies on its own.
        timeout_s: the longest wait for a worker.
        gather: brings the payloads of a batch's shards to every device.
        repeats: returns whether passes are to have the last batch again and again, unread.
        choices: which samples come when.
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
        self._source = source_of(dataset, collate, seed, self._workers, choices)
        self.dataset = self._source.dataset
        """The data set, stream or function that the batches come from."""
        self.batch_size = choices.get("batch_size")
        """Number of samples in a whole batch, over all devices; None where batches differ."""
        self.track = LoaderTrack(self._source.size, first_epoch)
        """Which passes the loader has been through."""
        self._shares, self._own, self._gather = shares, own, gather
        self._repeats = repeats
        self._last: ShardedBatch | None = None
        self.note_reading: Callable[[bool], None] = lambda reads: None
        """Called as a wait for a batch begins, and as it ends."""
        self._pin_memory = pin_memory
        self._timeout_s = timeout_s
        self._data_digest = 0
        self._had_samples = self._has_checked = False
        self._warned = False

    def __len__(self) -> int:
        """Number of batches in a pass; TypeError for a stream that does not know its length."""
        return self._source.batches()

    def __iter__(self) -> Generator[ShardedBatch, None, str]:
        """Begin a new pass.

        Raises:
            TypeError: ``collate`` returned nothing.
            SampleError: a sample could not be read, no worker delivered one within the timeout, or
                a stream that had samples has none any more.
            CheckpointError: a sampler gave another order than in the run that was saved.
        """
        this = self.track.start_pass()
        used = this.given
        try:
            if this.given < this.end:
                yield from self._repeated(this, 0) if self._is_repeating() else self._batches(this)
        except GeneratorExit:
            # The script has left its loop by `break` or an exception, and dropped the iterator.
            self.track.end(this, broken_off=True)
            raise
        if not this.given:
            self._warn_of_nothing(this)
        self.track.end(this, broken_off=False)
        # The text of a StopIteration that nobody catches; a loop takes no notice of it.
        return _USED_BEFORE if 0 < this.given <= used else ""

    def _batches(self, this: DataPass) -> Iterator[ShardedBatch]:
        order = self._order(this)
        if self._source.skips:
            yield from self._unread(this, order)
        # Only now is it known that all was used before the run resumed.
        if this.given >= this.end:
            return
        start, process, handed = host_now_s(), os.getpid(), 0
        requests = self._requests(this, order)
        reader = self._source.reader(this, self.track)
        # Workers are forked in here, where Ctrl-C would be lost: see `onefold.system.process`.
        with ctrl_c_later():
            answers = self._workers.answers(
                reader, requests, pin_memory=self._pin_memory, timeout_s=self._timeout_s
            )
        try:
            while this.given < this.end:
                # The shares first, then the answer: see the note on shares that change.
                requests.follow(self._shares(), self._own(), this.given)
                answer = self._next(answers)
                # Dropped: batches that were read ahead for the previous shares.
                while answer.request.turn != requests.turn:
                    answer = self._next(answers)
                payloads = _checked(answer.payloads)
                if answer.over:
                    self._check_not_exhausted(this)
                    this.end = this.given
                    self.track.note_length(this.given, self._shares().devices)
                    break
                self._had_samples = True
                # Before the yield: the script may never come back for the next batch.
                _handed_out(answer, this)
                batch = self._batch(answer, payloads, this, start)
                self._last = batch if self._repeats else None
                yield batch
                handed += 1
                if self._is_repeating():
                    yield from self._repeated(this, handed)
                    break
                # The wait for the next batch begins when the script asks for it.
                start = host_now_s()
        finally:
            # In a child that the script forked inside its loop, this iterator is only a copy.
            if os.getpid() != process:
                disown(answers)
            # An exception keeps this frame, and would keep the worker processes with it. Ending
            # them happens in a destructor, where Ctrl-C would be lost.
            with ctrl_c_later():
                del answers

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
        """Yield the last batch, as often as the pass has batches besides those handed out."""
        assert self._last is not None
        batches = _OF_A_STREAM
        with suppress(TypeError):
            batches = len(self)
        for _ in range(batches - handed):
            yield replace(self._last)
        this.given = this.end

    def _warn_of_nothing(self, this: DataPass) -> None:
        """Say, once and on one device, that a pass had no batch."""
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
        # A loop over nothing would train no more, without a word.
        if self._had_samples and not this.given:
            raise SampleError(
                f"{self.track.size.kind} gave no sample in epoch {this.number}, and had some in a "
                f"pass before: expected one that begins anew with every iter(). An iterator can be "
                f"gone through once; give the object that makes it, or have __iter__ make it"
            )

    def _next(self, answers: Iterator[Answer]) -> Answer:
        began = time.monotonic()
        self.note_reading(True)
        try:
            answer = next(answers)
        except RuntimeError as error:
            # DataLoader raises the same class for a timeout and for whatever else goes wrong, and a
            # collate function may raise it as well: so the text and the time must both fit.
            late = time.monotonic() - began >= self._timeout_s and "timed out" in str(error)
            if not self._workers.number or not late:
                raise
            raise SampleError(
                f"the loader's workers gave nothing within {self._timeout_s:g} s: expected a "
                f"batch. Reading takes longer (raise timeout_s of Trainer, or onefold run "
                f"--timeout), or what a worker had read could not be sent, which it has reported "
                f"above; with workers=0 this process reads"
            ) from error
        finally:
            self.note_reading(False)
        # The very first answer carries the digest, even if its batch is dropped.
        self._data_digest = answer.digest or self._data_digest
        return answer

    def _unread(self, this: DataPass, order: Order) -> Iterator[ShardedBatch]:
        """Yield batches without their samples for as long as the script runs through what is done.

        Those that the script then keeps for later are read when they are used.
        """
        position = self.track.position
        while position is not None and position.replaying() and this.given < this.end:
            start = this.given
            found = position.next_batch(self.track.number, this.number, start)
            if found is None and order.indices is None:
                this.end = start  # a stream, which had no more than that
                return
            stop = order.stop(start)
            samples = stop - start
            # Else the script has left this batch out, and a later one was used.
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
        if this.end <= this.given:
            this.given = this.end

    def _read_later(self, this: DataPass, order: Order, start: int, stop: int) -> ShardedBatch:
        """Read a batch that was handed out unread."""
        began = host_now_s()
        reader = self._source.reader(replace(this, used=start), self.track)
        requests = self._requests(replace(this, given=start, end=stop), order)
        here = Workers(number=0)
        answer = next(here.answers(reader, requests, pin_memory=False, timeout_s=self._timeout_s))
        return self._batch(answer, _checked(answer.payloads), this, began)

    def _order(self, this: DataPass) -> Order:
        order = self._source.order(this, self.track.number)
        self.track.settle(this, order.length, order.digest.hex())
        return order

    def _requests(self, this: DataPass, order: Order) -> Requests:
        place = this.number, this.given, this.end
        by = self.track.number, self._shares(), self._own()
        checks, self._has_checked = not self._has_checked, True
        return Requests(*place, order, *by, checks)


def _handed_out(answer: Answer, this: DataPass) -> None:
    """Note in the pass that a batch is handed out, and where a stream stands after it."""
    this.given = answer.request.stop
    if answer.state is not None:
        # Of those before, only the one after the last batch that was used can still be asked for.
        this.states = {place: s for place, s in this.states.items() if place >= this.used}
        this.states[this.given] = answer.state


def _checked(payloads: dict[int, Any] | BadSample) -> dict[int, Any]:
    if isinstance(payloads, BadSample):
        # Made in a function of its own: a frame that holds its exception is a cycle of references,
        # and would keep the workers alive.
        raise _sample_error(payloads)
    for shard, payload in payloads.items():
        if payload is None:
            raise TypeError(
                f"collate returned None for the samples of shard {shard}: expected what the loss "
                f"takes as its batch. Does the function lack its return?"
            )
    return payloads


def _sample_error(bad: BadSample) -> SampleError | CheckpointError:
    if not bad.doing:
        return CheckpointError(bad.text)
    error = SampleError(
        f"{bad.doing} {bad.index} in epoch {bad.epoch} failed: {bad.kind}: {bad.text}"
    )
    # As a note: the traceback of another process cannot be chained to this one's.
    if bad.traceback:
        error.add_note(f"Where it happened:\n{bad.traceback}")
    return error


def source_of(
    dataset: Any, collate: Collate | None, seed: int, workers: Workers, choices: Choices
) -> Indexed | Stream:
    """Find how a data set is read.

    Args:
        dataset: what the user gave; see `Loader`.
        collate: makes a shard's payload.
        seed: seed of the run.
        workers: how many processes read ahead.
        choices: which samples come when.

    Raises:
        TypeError: the data set has neither an index nor passes.
        ValueError: the choices do not fit the data set, or each other.
    """
    if _is_loader(dataset) or not is_stream(dataset):
        if not isinstance(dataset, Items | FunctionBatches):
            _check_index(dataset)
        return Indexed(dataset, collate, seed, choices)
    if workers.number > 1:
        raise ValueError(
            f"{type(dataset).__name__} is a stream, which one process reads from beginning to end: "
            f"expected workers of 0 or 1, got {workers.number}"
        )
    given = ["shuffle"] if choices.get("shuffle") else []
    by_index = "lengths", "sampler", "batch_sampler"
    given += [name for name in by_index if choices.get(name) is not None]
    if given:
        raise ValueError(
            f"{type(dataset).__name__} is a stream, whose samples come in its own order, so "
            f"{' and '.join(given)} cannot be followed: leave that out. To shuffle a stream, "
            f"shuffle in it: a buffer from which it yields at random, or the order of its files"
        )
    drop_last = bool(choices.get("drop_last"))
    size, stream = choices.get("batch_size"), load("data_order.stream").Stream
    made: Stream = stream(dataset, collate, seed, size, drop_last=drop_last)
    return made


def _is_loader(dataset: Any) -> bool:
    return all(hasattr(dataset, name) for name in ("batch_size", "dataset", "__iter__"))


def _check_index(dataset: Any) -> None:
    if _is_loader(dataset):
        raise TypeError(
            f"expected a data set, got a {type(dataset).__name__}, which makes batches: give "
            f"its dataset, or to trainer.loader, evaluate and predict a DataLoader of PyTorch"
        )
    if not (hasattr(dataset, "__len__") and hasattr(dataset, "__getitem__")):
        raise TypeError(
            f"expected a data set with a length and an item for each index, or a stream that can "
            f"be iterated again and again in one order, got {type(dataset).__name__}. An iterator "
            f"or generator ends with its first pass: give what makes it, such as an object with "
            f"__iter__. Batches that the script makes itself: trainer.batches, or trainer.step"
        )


DataSource = SizedDataset | Iterable[Any] | DataLoader[Any]
"""What a loader can be made of: a data set with an index, a stream, or a DataLoader."""


class TorchNames(TypedDict, total=False):
    """The arguments of `torch.utils.data.DataLoader` that may stand beside ours."""

    sampler: Iterable[int] | None
    """Yields the numbers of the samples in the order of a pass; its length is the pass."""
    batch_sampler: Iterable[Sequence[int]] | None
    """Yields the numbers of the samples of whole batches, over all devices."""
    num_workers: int
    """The same as ``workers``."""
    collate_fn: Collate | None
    """The same as ``collate``."""
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
    """Read the arguments of `Trainer.loader`, `evaluate` or `predict`.

    Returns:
        Those of `onefold.data_order.loader.Loader`, by name.

    Args:
        dataset: a data set, a stream, or a DataLoader with its own settings.
        names: what was given by PyTorch's names.
        batch_size, workers, collate, shuffle, lengths, drop_last: what was given by ours.
        in_order: visit samples in the order of the data set where a DataLoader would shuffle.

    Raises:
        TypeError: a name is unknown, one thing was given by two names, a DataLoader was given
            settings beside its own, or cannot be taken over.
    """
    unknown = names.keys() - TorchNames.__annotations__.keys()
    if unknown:
        raise TypeError(
            f"unexpected argument {', '.join(sorted(unknown))}: expected those of trainer.loader, "
            f"or of PyTorch's DataLoader {', '.join(TorchNames.__annotations__)}"
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
            "expected batch_size, the number of samples in a batch over all devices; or a "
            "batch_sampler, or a DataLoader, which have their own"
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
        raise TypeError(f"{ours} and {theirs} are the same thing: expected one of the two names")
