"""A stream as the source of a loader's batches: samples in one order, without an index.

Note: who reads a stream
------------------------
A stream cannot be asked for the samples of one shard, so every process reads all of it, batch after
batch in the order in which the samples come, and collates those of its own shards. What a stream
does for each sample is therefore not divided between devices; collating and computing are. One
process at most reads ahead for each device: a stream that deals itself out to the workers of a
DataLoader sees that it is alone, and yields everything.

Note: a stream that goes on
---------------------------
A pass begins with a new ``iter()`` and with generators seeded from the seed, the pass and the
loader: the global ones, and those that the stream holds. A stream may draw from the global ones at
any time, so their states are kept from batch to batch, apart from the script's own. A resumed run
begins the pass again and leaves out the samples that were used, which repeats all draws. If the
stream has ``state_dict`` and ``load_state_dict``, it goes on from its own state instead: that of
the moment after the last batch that was used, together with the states of the global generators.
Both are noted with every batch, before any further sample is read, and in the process that reads,
as only there the stream moves.

Note: shares that change while the stream was read ahead
---------------------------------------------------------
The requests then go back to batches that were read already, and a stream cannot be read twice. So
the reader keeps the samples of the last few batches: as many as may have been requested ahead.
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
"""Batches whose samples are kept: one in use, two that the one worker reads ahead, one more."""
_HOST = torch.device("cpu")
_PARTS = 100
"""The most parts of a stream that are looked at for their library."""
_ORDERS = {
    "webdataset": "For webdataset, give shuffle a seed, .shuffle(1000, seed=0), and WebDataset "
    "shardshuffle and seed without detshuffle=True, which counts passes.",
    "streaming": "StreamingDataset counts its passes: in a subclass, define `def set_epoch(self, "
    "epoch): self.next_epoch = epoch`.",
    "datasets": "For datasets, give shuffle a seed: .shuffle(seed=0).",
    "torchdata": "For torchdata, shuffle by a generator that the stream holds.",
}
"""What to do about the order of a stream, by the library that it is made with."""
_OTHERWISE = (
    "To go on with other samples, give allow_changed=['dataset'] to trainer.load, or onefold run "
    "--allow-changed dataset; then " + PROMISES["dataset"]
)


class Stream:
    """A stream, whose passes are of any length, and begin anew with ``iter()``.

    Args:
        dataset: anything that can be iterated any number of times.
        collate: makes a shard's payload; PyTorch's default if None.
        seed: seed of the run.
        batch_size: number of samples in a whole batch.
        drop_last: leave out the last batch if it is short.

    Raises:
        TypeError, ValueError: the size is no positive number.
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
    """Whether a resumed script may leave out batches that are done."""

    def batches(self) -> int:
        """Return the number of batches in a pass, if the stream knows its length.

        Raises:
            TypeError: the stream has no length.
        """
        return self.size.batches(len(self.dataset))

    def order(self, this: DataPass, loader: int) -> Order:
        """Find the order of a pass."""
        return Order(None, self.size.batch_size)

    def reader(self, this: DataPass, track: LoaderTrack) -> Dataset[Answer]:
        """Make what answers the requests of a pass."""
        return _StreamReader(self, this, track)


_Piece = tuple[list[Any], list[bytes], StreamState | None]
"""One batch as it came from the stream, digests of some of its samples, and where the stream then
stood."""


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
        # Nobody goes on in the middle of an evaluation.
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
        """Make the first shard of this pass twice; see `onefold.data_order.reader`."""
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
        """Return the batch that begins at ``start``, which may have been read for other shares."""
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
        # Before anything is collated, which may change samples.
        some = self._note_read(samples)
        # Noted before anything else is drawn or read: see the note on a stream that goes on.
        self._generators = packed_generators(_HOST)
        piece = samples, some, self._state_now()
        self._read = dict([*self._read.items(), (start, piece)][-_KEPT:])
        return piece

    def _start_stream(self, start: int) -> None:
        if self._to_check is not None and (before := self._to_check[0]) < self._numbers[1]:
            # A pass before: begun as it was then, to see whether the same samples come first.
            self._begin(before)
            self._samples = iter(self._stream)
            self._read_again(before, self._to_check[1])
            self._digest = 0
        self._begin(self._numbers[1])
        if self._state is not None and self._has_state and self._state.own is not None:
            self._stream.load_state_dict(from_json(self._state.own))
            self._samples = iter(self._stream)
            # After everything else: whatever was drawn until here was drawn by the run before.
            states = bytearray.fromhex(self._state.generators)
            put_generators(torch.frombuffer(states, dtype=torch.uint8), _HOST)
            return
        self._samples = iter(self._stream)
        # What was used before the run resumed is read once more, and dropped.
        self._read_again(self._numbers[1], start)

    def _begin(self, epoch: int) -> None:
        """Put all that a pass depends on where it is when the pass begins."""
        number = loader_seed("stream", self._numbers[0], epoch, loader=self._loader)
        seed_generators(number)
        OwnGenerators(generators_in(self._stream)).seed(number, "held by a stream")
        if callable(set_epoch := getattr(self._stream, "set_epoch", None)):
            set_epoch(epoch)

    def _read_again(self, epoch: int, stop: int) -> None:
        """Read samples up to a place of a pass, in the batches in which they were read.

        Raises:
            CheckpointError: they are others than those that were used before the run resumed.
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
            f"{self._source.size.kind} does not give the samples that the run used that was saved: "
            f"the first {stop} of pass {number} are others now. Expected an order that depends on "
            f"the generators of PyTorch, Python and NumPy, on those that the stream holds, and on "
            f"set_epoch(epoch), which is called before each pass if the stream has it; not on "
            f"passes before, the time or the process. {' '.join([*advice, _OTHERWISE])}"
        )

    def _state_now(self) -> StreamState | None:
        """Note where the stream stands, as a checkpoint has it, if the stream itself says so."""
        if not self._is_followed or self._generators is None:
            return None
        if not self._keeps_state:
            return StreamState(None, "", self._digest)
        try:
            # Copied by this, so that the stream may go on changing what it gave.
            own = to_json(self._stream.state_dict(), "the state of the stream")
        except TypeError as error:
            # The run is none the worse: without a state, going on reads what was used once more.
            self._keeps_state = False
            _log.warning(
                "%s: so a run that goes on reads the stream from its beginning, and leaves out "
                "what was used",
                error,
            )
            return StreamState(None, "", self._digest)
        return StreamState(own, self._generators.numpy().tobytes().hex(), self._digest)


def _modules_of(stream: object) -> set[str]:
    """The libraries whose classes a stream is made of."""
    parts = [stream, *vars(stream).values()] if hasattr(stream, "__dict__") else [stream]
    parts += [each for part in parts if isinstance(part, list | tuple) for each in part[:_PARTS]]
    return {type(each).__module__.partition(".")[0] for each in parts}
