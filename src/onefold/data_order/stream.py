"""Streams as sources of a loader's batches: samples in a fixed order, without an index.

Note: who reads a stream
------------------------
A stream cannot provide the samples of a single shard. Every process therefore reads all of it,
batch after batch, and collates the samples of its own shards. Devices share the work of collating
and computing, but not the work that a stream does per sample. Each device has at most one worker: a
stream that divides itself among the workers of a DataLoader sees that it is alone, and yields all
samples.

Note: resuming a stream
-----------------------
A pass starts with a new ``iter()``, after seeding the generators from the seed, the pass and the
loader: the global ones, and those that the stream holds. A stream may draw from the global ones at
any time, so their states are kept from batch to batch, separate from the script's. A resumed run
starts the pass again and skips the used samples, which repeats all draws. If the stream has
``state_dict`` and ``load_state_dict``, it continues from its own state instead: the state after the
last used batch, together with the states of the global generators. Both are recorded with every
batch before the next sample is read, in the process that reads, because only there the stream
advances.

Note: a second start on a copy
------------------------------
An order that comes from the clock would be found only when the run resumes. So in a run with a
record, the first pass of a stream is started a second time, on a deep copy, and the first samples
are compared. The stream itself must not move: nothing is compared if it refers to an iterator, a
file, a lock or other state that a copy might share, or if it is large or slow. Numbers and
containers in classes and globals are restored afterwards. An order that comes from the process id
alone is not found.

Note: shares that change after prefetching
------------------------------------------
The requests then return to batches that were already read, but a stream cannot be read twice. The
reader therefore keeps the samples of the last few batches: as many as may have been prefetched.
"""

from __future__ import annotations

import gc
import logging
import sys
import time
from collections import deque
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from copy import deepcopy
from dataclasses import replace
from functools import cached_property, partial
from types import FunctionType
from typing import Any, cast

import torch
from torch.utils.data import Dataset, default_collate

from onefold.core.batch import DataPass
from onefold.core.encoding import from_json, to_json
from onefold.core.numbers import check_whole
from onefold.core.packed_generators import packed_generators, put_generators
from onefold.core.randomness import (
    OwnGenerators,
    loader_seed,
    seed_generators,
)
from onefold.core.settings import PROMISES
from onefold.core.shard import cut_bounds
from onefold.data_order.indexed import Choices
from onefold.data_order.kept_state import CLOSED, MOST, generators_in, reachable
from onefold.data_order.order import LoaderSize, Order
from onefold.data_order.position import STREAM, LoaderTrack, StreamState
from onefold.data_order.reader import (
    Answer,
    BadSample,
    Collate,
    FirstShard,
    HeldGenerators,
    Request,
    bad_sample,
    digest_of,
    digest_samples,
    join_digests,
    take_items,
)
from onefold.errors import CheckpointError

__all__ = ["Stream", "check_workers", "stream_of"]

_log = logging.getLogger("onefold")

_KEPT = 4
"""Number of batches kept: one in use, two prefetched by the worker, and one more."""
_HOST = torch.device("cpu")
_QUICK_S = 1.0
"""Maximum time of reading a first batch whose stream is started a second time."""
_COMPARED = 4
"""Maximum number of samples that are compared with a second start."""
_LARGEST = 1 << 24
"""Size of a stream that is not copied, in bytes."""
_LOSING = ("BufferShuffledExamplesIterable",)
"""Parts of streams whose samples are not in the stream's state: those of Hugging Face datasets."""
_WARNED: set[str] = set()
_ORDERS = {
    "webdataset": "For webdataset, set a seed for shuffle, .shuffle(1000, seed=0), and in "
    "WebDataset set shardshuffle and seed without detshuffle=True, which counts passes.",
    "streaming": "StreamingDataset counts its passes: in a subclass, define `def set_epoch(self, "
    "epoch): self.next_epoch = epoch`.",
    "datasets": "For datasets, set a seed for shuffle: .shuffle(seed=0).",
    "torchdata": "For torchdata, shuffle with a generator that the stream holds.",
}
"""How to fix the order of a stream, by library."""
_OTHERWISE = (
    "To continue with other samples, pass allow_changed=['dataset'] to trainer.load, or use "
    "onefold run --allow-changed dataset; then " + PROMISES["dataset"]
)


class Stream:
    """A stream; its passes have any length, and each starts with ``iter()``.

    Args:
        dataset: an iterable that can be iterated any number of times.
        collate: makes a shard's payload; PyTorch's default if None.
        seed: the run's seed.
        batch_size: global batch size, in samples.
        drop_last: whether to drop the last batch if it is short.

    Raises:
        TypeError, ValueError: the batch size is not a positive integer.
    """

    def __init__(
        self,
        dataset: Iterable[Any],
        collate: Collate | None,
        seed: int,
        batch_size: object,
        *,
        drop_last: bool,
    ) -> None:
        batch_size = check_whole("batch_size", batch_size, least=1)
        self.dataset: Any = dataset
        self.starts_twice = False
        """Whether the next pass that begins is started a second time on a copy, as the first."""
        self.collate, self.seed = collate or default_collate, seed
        self.size = LoaderSize(
            samples=0,
            batch_size=batch_size,
            drop_last=drop_last,
            kind=f"{STREAM}{type(dataset).__name__}",
        )

    @cached_property
    def loses_samples(self) -> bool:
        """Whether the stream's state lacks samples that the stream has read."""
        return any(type(each).__name__ in _LOSING for each in _parts_of(self.dataset))

    skips = True
    """Whether a resumed script may skip completed batches."""

    def batches(self) -> int:
        """Return the number of batches in a pass, if the stream has a length.

        Raises:
            TypeError: the stream has no length.
        """
        return self.size.batches(len(self.dataset))

    def order(self, this: DataPass, loader: int) -> Order:
        """Return the order of a pass."""
        return Order(None, self.size.batch_size)

    def reader(self, this: DataPass, track: LoaderTrack) -> Dataset[Answer]:
        """Return the object that answers the requests of a pass."""
        return _StreamReader(self, this, track)


def check_workers(dataset: Iterable[Any], number: int) -> None:
    """Reject more than one worker process for a stream.

    Raises:
        ValueError: there are more.
    """
    if number > 1:
        raise ValueError(
            f"{type(dataset).__name__} is a stream, which a single process reads from beginning to "
            f"end: workers must be 0 or 1, but got {number}"
        )


def stream_of(
    dataset: Iterable[Any], collate: Collate | None, seed: int, workers: int, choices: Choices
) -> Stream:
    """Create the source of a stream; arguments and errors are those of `loader.source_of`."""
    check_workers(dataset, workers)
    given = ["shuffle"] if choices.get("shuffle") else []
    by_index = "lengths", "sampler", "batch_sampler"
    given += [name for name in by_index if choices.get(name) is not None]
    if given:
        raise ValueError(
            f"{type(dataset).__name__} is a stream, whose order is its own, and does not support "
            f"{' and '.join(given)}. Shuffle inside the stream, with a shuffle buffer or by file "
            f"order"
        )
    drop_last = bool(choices.get("drop_last"))
    return Stream(dataset, collate, seed, choices.get("batch_size"), drop_last=drop_last)


_Piece = tuple[list[Any], list[bytes], StreamState | None]
"""The samples of one batch, digests of some of them, and the state of the stream after them."""


class _StreamReader(Dataset[Answer]):
    """Reads a stream batch by batch, and makes the payloads of this process's shards."""

    def __init__(self, source: Stream, this: DataPass, track: LoaderTrack) -> None:
        self._source = source
        self._stream = self.dataset = stream = source.dataset
        self.collate = source.collate
        self._numbers, self._loader = (source.seed, this.number), track.number
        self._place, self._state = this.used, cast(StreamState | None, this.states.get(this.used))
        self._has_state = all(
            callable(getattr(stream, name, None)) for name in ("state_dict", "load_state_dict")
        )
        # An evaluation is never resumed in the middle.
        self._is_followed = track.position is not None
        # Without a state in the middle of a pass, the saved run did without it.
        known = not this.used or self._state is not None
        self._keeps_state = known and self._is_followed and self._has_state and track.keeps_state
        if self._keeps_state and source.loses_samples:
            self._drop_state(f"the state of {source.size.kind} lacks its shuffle buffer")
        at_place = track.position is not None and not track.position.replaying()
        self._to_check = track.last_to_check() if at_place else None
        self._digest = 0 if self._state is None else self._state.read
        self._held = HeldGenerators(source.collate)
        self._starts_twice = source.starts_twice and not this.used
        source.starts_twice &= bool(this.used)
        self._has_checked = False
        self._samples: Iterator[Any] = iter(())
        self._generators: torch.Tensor | None = None  # (n,) uint8
        self._read: dict[int, _Piece] = {}
        self._ahead: list[Any] = []
        """The first sample of the next batch, if it is known."""
        self._failure: Exception | None = None
        """The exception that reading it raised."""

    def __getitem__(self, request: Request) -> Answer:
        start = request.stop - request.samples
        try:
            samples, some, state = self._piece(start, request.samples)
        except CheckpointError as error:
            return Answer(request, BadSample(0, request.epoch, "", str(error), "", doing=""))
        except Exception as error:
            return Answer(request, bad_sample(self._place, request.epoch, error))
        drop_last = self._source.size.drop_last
        if not samples or (drop_last and len(samples) < request.samples):
            return Answer(request, {}, over=True)
        found = replace(request, samples=len(samples), stop=start + len(samples))
        first = self._first_shard(found, samples)
        payloads = self._held.read(lambda: self._payloads(found, samples, first))
        digest = join_digests(start + len(samples), [*some, first.digest] if first else some)
        return Answer(found, payloads, digest, state)

    def _first_shard(self, request: Request, samples: list[Any]) -> FirstShard | None:
        """Make the first shard of this pass in advance; see `onefold.data_order.reader`."""
        if self._has_checked:
            return None
        self._has_checked = True
        _, stop = cut_bounds(len(samples), request.shares.shards)[0]
        collate = partial(self._collated, request, 0)
        return self._held.read(lambda: FirstShard(samples[:stop], collate))

    def _payloads(
        self, request: Request, samples: list[Any], made: FirstShard | None
    ) -> dict[int, Any] | BadSample:
        shares = request.shares
        bounds = cut_bounds(len(samples), shares.shards)
        payloads: dict[int, Any] = {}
        for shard in (shard for device in request.own for shard in shares.read_by(device)):
            first, stop = bounds[shard]
            if first < stop:
                collate = partial(self._collated, request, first)
                if shard or made is None:
                    payloads[shard] = collate(samples[first:stop])
                    continue
                payload = made.compared(request, samples[first:stop], collate)
                if isinstance(payload, BadSample):
                    return payload
                payloads[shard] = payload
        return payloads

    def _collated(self, request: Request, first: int, samples: list[Any]) -> Any:
        start = request.stop - request.samples
        seed = loader_seed("collate at place", *self._numbers, start + first, loader=self._loader)
        seed_generators(seed, common=("batch", (*self._numbers, self._loader, start)))
        self._held.seed(seed)
        return self._source.collate(samples)

    def _piece(self, start: int, wanted: int) -> _Piece:
        """Return the batch that starts at ``start``; it may have been read for other shares."""
        if start in self._read:
            return self._read[start]
        copy, began = None, time.monotonic()
        if self._generators is None:
            if self._starts_twice and not start and self._to_check is None:
                copy = _Copy.of(self._stream)
            self._start_stream(start)
        else:
            put_generators(self._generators, _HOST)
        if self._failure is not None:
            raise self._failure
        samples, self._ahead = self._ahead, []
        for sample in take_items(self._samples, wanted - len(samples)):
            samples.append(sample)
            self._place += 1
        # Digest samples before collating, which may change them.
        some = self._note_read(samples)
        # Record states before drawing or reading more: see the note on resuming a stream.
        self._generators = packed_generators(_HOST)
        if copy is not None and time.monotonic() - began < _QUICK_S:
            self._compare_start(copy, samples[:_COMPARED])
        state = self._state_now()
        if state is not None and state.own is not None:
            # At its end a stream may have returned to its beginning, for the next pass. A run that
            # resumes there reads the pass again to find its end.
            goes_on = len(samples) == wanted and self._goes_on()
            state = state if goes_on else StreamState(None, "", self._digest)
        piece = samples, some, state
        self._read = dict([*self._read.items(), (start, piece)][-_KEPT:])
        return piece

    def _goes_on(self) -> bool:
        """Read the first sample of the next batch, to know whether there is one."""
        assert self._generators is not None
        put_generators(self._generators, _HOST)
        try:
            self._ahead = [*take_items(self._samples, 1)]
        except Exception as error:
            self._failure = error
        self._place += len(self._ahead)
        self._generators = packed_generators(_HOST)
        return bool(self._ahead or self._failure)

    def _start_stream(self, start: int) -> None:
        if self._to_check is not None and (before := self._to_check[0]) < self._numbers[1]:
            # Read the previous pass again, to check whether it starts with the same samples.
            self._begin(self._stream, before)
            self._samples = iter(self._stream)
            self._read_again(before, self._to_check[1])
            self._digest = 0
        self._begin(self._stream, self._numbers[1])
        if self._state is not None and self._has_state and self._state.own is not None:
            self._stream.load_state_dict(from_json(self._state.own))
            self._samples = iter(self._stream)
            # Restore the generators last: the saved states include all draws up to this point.
            states = bytearray.fromhex(self._state.generators)
            put_generators(torch.frombuffer(states, dtype=torch.uint8), _HOST)
            return
        self._samples = iter(self._stream)
        # Read the samples that were used before the resume again, and drop them.
        self._read_again(self._numbers[1], start)

    def _begin(self, stream: Any, epoch: int) -> None:
        """Seed the generators and set the epoch, as at the start of a pass."""
        number = loader_seed("stream", self._numbers[0], epoch, loader=self._loader)
        seed_generators(number)
        OwnGenerators(generators_in(stream)).seed(number, "held by a stream")
        if callable(set_epoch := getattr(stream, "set_epoch", None)):
            set_epoch(epoch)

    def _compare_start(self, copy: _Copy, samples: list[Any]) -> None:
        """Start the pass again on a copy, and warn if the first samples differ."""
        number = self._numbers[1]
        try:
            with copy.keeping_shared():
                self._begin(copy.stream, number)
                copied = iter(copy.stream)
                again = [*take_items(copied, len(samples))]
                continues = not self._keeps_state or _continues(copy.stream, copied)
        except Exception as error:  # the stream itself was read without one
            _log.debug("the copy of a stream cannot be read: %s", error)
            return
        if [*map(digest_of, again)] != [*map(digest_of, samples)]:
            _log.warning(
                "%s yields other samples when pass %d is started a second time, so this run cannot "
                "resume in this pass or after it. %s",
                self._source.size.kind,
                number,
                self._words_of_order(),
            )
        elif not continues:
            kind = self._source.size.kind
            self._drop_state(f"after load_state_dict(state_dict()), {kind} yields other samples")

    def _read_again(self, epoch: int, stop: int) -> None:
        """Read a pass again up to a position, in the same batches.

        Raises:
            CheckpointError: the samples differ from those used before the run resumed.
        """
        self._digest, size, checked, found = 0, self._source.size.batch_size, self._to_check, 0
        for start in range(0, stop, size):
            samples = [*take_items(self._samples, min(size, stop - start))]
            if not samples:
                break
            self._note_read(samples)
            if checked is not None and checked[:2] == (epoch, start + len(samples)):
                found = self._digest
        if checked is not None and checked[0] == epoch and checked[1] <= stop:
            self._to_check = None
            if found != checked[2]:
                raise self._refusal(*checked[:2])

    def _note_read(self, samples: list[Any]) -> list[bytes]:
        numbers = digest_samples(len(samples)) if samples else ()
        some = [digest_of(samples[number]) for number in numbers]
        self._digest = join_digests(self._digest, some)
        return some

    def _refusal(self, number: int, stop: int) -> CheckpointError:
        return CheckpointError(
            f"{self._source.size.kind} yields other samples than in the saved run: the first "
            f"{stop} of pass {number} differ. {self._words_of_order()} {_OTHERWISE}"
        )

    def _words_of_order(self) -> str:
        libraries = {_package_of(type(each)) for each in _parts_of(self._stream)}
        advice = [text for name, text in _ORDERS.items() if name in libraries]
        allowed = (
            "The order may depend on the generators of PyTorch, Python and NumPy, on those that "
            "the stream holds, and on set_epoch(epoch), which is called before each pass if the "
            "stream has it; but not on earlier passes, the time or the process."
        )
        return " ".join([allowed, *advice])

    def _state_now(self) -> StreamState | None:
        """Return the stream's state for a checkpoint; None if no run resumes from it."""
        if not self._is_followed or self._generators is None:
            return None
        if not self._keeps_state:
            return StreamState(None, "", self._digest)
        try:
            # to_json copies the state, so that the stream may change it afterwards.
            own = to_json(self._stream.state_dict(), "the state of the stream")
        except TypeError as error:
            self._drop_state(str(error))
            return StreamState(None, "", self._digest)
        return StreamState(own, self._generators.numpy().tobytes().hex(), self._digest)

    def _drop_state(self, why: str) -> None:
        """Continue without a state: a resumed run then reads the used samples again."""
        self._keeps_state = False
        if why not in _WARNED:
            _WARNED.add(why)
            _log.warning(
                "%s: a resumed run therefore reads the stream from its beginning and skips used "
                "samples",
                why,
            )


class _Copy:
    """A copy of a stream, to start a pass without moving the stream.

    Args:
        stream: the stream.
        found: all objects that it refers to, without those of installed libraries.
    """

    def __init__(self, stream: object, found: list[Any]) -> None:
        copied: dict[int, Any] = {}
        self.stream: Any = deepcopy(stream, copied)
        # The copy shares the code of the stream, and thereby its classes and globals.
        shared = [each for each in found if id(each) not in copied]
        coded = [x for x in shared if isinstance(x, _CODE) and _package_of(x) not in CLOSED]
        self._owners = {x if isinstance(x, type) else sys.modules[x.__module__] for x in coded}
        self._containers = [each for each in shared if type(each) in _CONTAINERS]
        self.has_iterators = any(hasattr(type(each), "__next__") for each in shared)

    @classmethod
    def of(cls, stream: object) -> _Copy | None:
        """Copy a stream; None if it is large, or if reading the copy might move the stream."""
        found = _parts_of(stream)
        own = [each for each in found if not isinstance(each, _CODE)]
        kinds = [kind for each in own for kind in type(each).__mro__]
        shares = any(_package_of(kind) in _SHARED for kind in kinds)
        try:
            if len(found) < MOST and not shares and _bytes_in(own) < _LARGEST:
                copy = cls(stream, found)
                return None if copy.has_iterators else copy
        except Exception as error:  # of the methods with which the script's classes copy themselves
            _log.debug("%s cannot be copied: %s", type(stream).__name__, error)
        return None

    @contextmanager
    def keeping_shared(self) -> Iterator[None]:
        """Restore numbers and containers in classes and globals that change in this context."""
        values = [(owner, *each) for owner in self._owners for each in vars(owner).items()]
        containers = [(each, each.copy()) for each in self._containers]
        try:
            yield
        finally:
            for owner, name, value in values:
                if isinstance(value, int | float) and vars(owner).get(name) is not value:
                    setattr(owner, name, value)
            for container, before in containers:
                if _ids_in(container) != _ids_in(before):
                    container.clear()
                    (getattr(container, "update", None) or container.extend)(before)


def _continues(stream: Any, samples: Iterator[Any]) -> bool:
    """Whether a stream that is being read continues from its own state as without it."""
    own, drawn = to_json(stream.state_dict(), "the state of the stream"), packed_generators(_HOST)
    expected = [*map(digest_of, take_items(samples, _COMPARED))]
    stream.load_state_dict(from_json(own))
    samples = iter(stream)
    put_generators(drawn, _HOST)
    return [*map(digest_of, take_items(samples, _COMPARED))] == expected


_CODE, _CONTAINERS = (type, FunctionType), (list, dict, set, deque)
_SHARED = ("_io", "_queue", "_thread", "ctypes", "mmap", "multiprocessing", "onefold", "socket")
"""Packages whose instances a copy might share with the stream, or fail to copy."""


def _parts_of(stream: object) -> list[object]:
    """Return everything that a stream refers to, apart from the code of installed packages."""
    files = {name: str(getattr(each, "__file__", "")) for name, each in [*sys.modules.items()]}
    installed = {name.partition(".")[0] for name, file in files.items() if "-packages" in file}
    return reachable([stream], CLOSED | installed)


def _package_of(value: Any) -> str:
    return str(value.__module__).partition(".")[0]


def _bytes_in(values: list[Any]) -> int:
    """Return the size of objects, and of the text, tensors and arrays that they refer to."""
    parts = [part for each in values for part in (each, *gc.get_referents(each))]
    return sum(getattr(each, "nbytes", 0) or sys.getsizeof(each) for each in parts)


def _ids_in(container: Any) -> list[int]:
    return [*map(id, container.values() if isinstance(container, dict) else container)]
