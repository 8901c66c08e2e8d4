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

Note: shares that change after prefetching
------------------------------------------
The requests then return to batches that were already read, but a stream cannot be read twice. The
reader therefore keeps the samples of the last few batches: as many as may have been prefetched.
"""

from __future__ import annotations

import logging
from collections.abc import Iterable, Iterator
from dataclasses import replace
from functools import partial
from typing import Any, cast

import torch
from torch.utils.data import Dataset, default_collate

from onefold.core.batch import DataPass
from onefold.core.encoding import from_json, to_json
from onefold.core.numbers import check_whole
from onefold.core.randomness import (
    OwnGenerators,
    loader_seed,
    packed_generators,
    put_generators,
    seed_generators,
)
from onefold.core.settings import PROMISES
from onefold.core.shard import cut_bounds
from onefold.data_order.kept_state import generators_in
from onefold.data_order.order import Order
from onefold.data_order.position import STREAM, LoaderSize, LoaderTrack, StreamState
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

__all__ = ["Stream"]

_log = logging.getLogger("onefold")

_KEPT = 4
"""Number of batches kept: one in use, two prefetched by the worker, and one more."""
_HOST = torch.device("cpu")
_PARTS = 100
"""Maximum number of a stream's parts that are searched for their library."""
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
        self.collate, self.seed = collate or default_collate, seed
        self.size = LoaderSize(
            samples=0,
            batch_size=batch_size,
            drop_last=drop_last,
            kind=f"{STREAM}{type(dataset).__name__}",
        )

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
        self._keeps_state = self._is_followed and self._has_state
        at_place = track.position is not None and not track.position.replaying()
        self._to_check = track.last_to_check() if at_place else None
        self._digest = 0 if self._state is None else self._state.read
        self._held = HeldGenerators(source.collate)
        self._has_checked = False
        self._samples: Iterator[Any] = iter(())
        self._generators: torch.Tensor | None = None  # (n,) uint8
        self._read: dict[int, _Piece] = {}

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
        if self._generators is None:
            self._start_stream(start)
        else:
            put_generators(self._generators, _HOST)
        samples = []
        for sample in take_items(self._samples, wanted):
            samples.append(sample)
            self._place += 1
        # Digest samples before collating, which may change them.
        some = self._note_read(samples)
        # Record states before drawing or reading more: see the note on resuming a stream.
        self._generators = packed_generators(_HOST)
        piece = samples, some, self._state_now()
        self._read = dict([*self._read.items(), (start, piece)][-_KEPT:])
        return piece

    def _start_stream(self, start: int) -> None:
        if self._to_check is not None and (before := self._to_check[0]) < self._numbers[1]:
            # Read the previous pass again, to check whether it starts with the same samples.
            self._begin(before)
            self._samples = iter(self._stream)
            self._read_again(before, self._to_check[1])
            self._digest = 0
        self._begin(self._numbers[1])
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

    def _begin(self, epoch: int) -> None:
        """Seed the generators and set the epoch, as at the start of a pass."""
        number = loader_seed("stream", self._numbers[0], epoch, loader=self._loader)
        seed_generators(number)
        OwnGenerators(generators_in(self._stream)).seed(number, "held by a stream")
        if callable(set_epoch := getattr(self._stream, "set_epoch", None)):
            set_epoch(epoch)

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
        advice = [text for name, text in _ORDERS.items() if name in _modules_of(self._stream)]
        return CheckpointError(
            f"{self._source.size.kind} yields other samples than in the saved run: the first "
            f"{stop} of pass {number} differ. The order may depend on the generators of PyTorch, "
            f"Python and NumPy, on those that the stream holds, and on set_epoch(epoch), which is "
            f"called before each pass if the stream has it; but not on earlier passes, the time or "
            f"the process. {' '.join([*advice, _OTHERWISE])}"
        )

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
            # Continue without a state: a resumed run then reads the used samples again.
            self._keeps_state = False
            _log.warning(
                "%s: a resumed run therefore reads the stream from its beginning and skips used "
                "samples",
                error,
            )
            return StreamState(None, "", self._digest)
        return StreamState(own, self._generators.numpy().tobytes().hex(), self._digest)


def _modules_of(stream: object) -> set[str]:
    """Return the libraries that define the classes of a stream's parts."""
    parts = [stream, *vars(stream).values()] if hasattr(stream, "__dict__") else [stream]
    parts += [each for part in parts if isinstance(part, list | tuple) for each in part[:_PARTS]]
    return {type(each).__module__.partition(".")[0] for each in parts}
