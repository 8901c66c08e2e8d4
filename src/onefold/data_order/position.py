"""Keeps track of where a run is: its step, its epoch, and how much each loader has been used.

`Position` counts steps and epochs. `LoaderTrack` records which passes over its data a loader has
been through, and which come next.

Note: what counts as done
-------------------------
A batch counts as used when its step is done, not when a loader hands it out: what was merely read
ahead is read again. An epoch counts as done if, since its last step, a pass over a data set has
ended or was broken off. Batches of the script's own reveal nothing about that, so with them an
epoch counts as done once a step was made in it. If both the pass and the loop over epochs are
broken off, the script may have been interrupted: the epoch then continues in the middle of the
pass.

Note: what a resumed script sees
--------------------------------
A resumed script runs again from its beginning, and then from the beginning of the epoch that it was
in. So it asks again for passes that it has already been through there: those come again empty, and
those of which no step used anything come again whole. A loader is recognized by where it is made:
outside the epochs or in one, and as which one there.
"""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Callable, Collection, Iterator, Mapping
from typing import Annotated, Any, Literal

import msgspec
from msgspec import Meta, Struct
from msgspec.structs import replace

from onefold.core.batch import DataPass, ShardedBatch
from onefold.core.encoding import from_json
from onefold.core.settings import PROMISES, check_same
from onefold.errors import CheckpointError

__all__ = [
    "BATCH_FUNCTION",
    "STREAM",
    "WHOLE",
    "Count",
    "LoaderSize",
    "LoaderTrack",
    "Position",
    "Reached",
    "SavedLoader",
    "SavedPass",
    "SavedPasses",
    "StreamState",
]


_log = logging.getLogger("onefold")


NextBatch = Callable[[int, int, int], tuple[int, int] | None]
"""Given the numbers of a loader and a pass, and the place where the batch before ends."""
Reached = Literal["epoch", "pass", "over"]
"""Where a loop of the script is: at the beginning of an epoch or of a pass, or past its epochs."""


class Position:
    """Where a trainer is in its run: it counts steps and epochs, and follows the loaders.

    Args:
        epoch_ended: called whenever an epoch has ended.
    """

    def __init__(self, epoch_ended: Callable[[], None] = lambda: None) -> None:
        self._epoch_ended = epoch_ended
        self.step = 0
        """Number of steps that are done."""
        self.epoch = 0
        """The epoch that the run is in, or the next one."""
        self.inside = False
        """Whether the run is in an epoch now."""
        # Whether the epoch counts as done if it ends here, and whether it does so after a `break`.
        self._epoch_used = False
        self._exhausted = False
        # Whether the last checkpoint took the epoch to be done; a step in it then proves it wrong.
        self._saved_as_done = False
        # How often the run was moved by a load: a loop over epochs that began before must not
        # count.
        self._visit = 0
        # The loaders that exist, and the saved ones that the script has not made yet. Keys are the
        # epoch in which a loader was made (None: outside), and its number there. Those that are
        # expected have made what a record answers, so that they are where the script brings them.
        self._tracks: dict[tuple[int | None, int], LoaderTrack] = {}
        self._waiting: dict[tuple[int | None, int], SavedLoader] = {}
        self._expected: dict[tuple[int | None, int], SavedLoader] = {}
        self._allow_changed: Collection[str] = ()
        self.reached: Callable[[Reached], None] = lambda where: None
        """Called where a loop of the script gets to one of these places."""
        self.replaying: Callable[[], bool] = lambda: False
        """Whether the script runs through what is done, so that no batch is read."""
        self.next_batch: NextBatch = lambda loader, number, given: None
        """Where the next batch of a pass ends that a step has used then, and its samples."""

    @property
    def awaits(self) -> bool:
        """Whether a resumed script is still to come to a pass of which the saved run used some."""
        waiting = any(each.passes.were_used for each in self._waiting.values())
        return waiting or any(track.awaits for track in self._tracks.values())

    @property
    def here(self) -> int | None:
        """The epoch that the run is in now; None outside of any."""
        return self.epoch if self.inside else None

    def epochs(self, number: int) -> Iterator[int]:
        """Yield the epochs from where the run is up to ``number``, and count them."""
        while self.epoch < number:
            self.reached("epoch")
            epoch, visit = self.epoch, self._visit
            self.inside, self._epoch_used, self._saved_as_done = True, False, False
            try:
                yield epoch
            except GeneratorExit:
                self.inside = False
                # An exception or a `break` in the loop. In the middle of a pass, it does not end
                # the epoch: see the note on what counts as done.
                if visit == self._visit and self._epoch_used and self._exhausted:
                    self._end_epoch()
                raise
            self.inside = False
            # Otherwise the run was moved by a load meanwhile, and that epoch is no longer ours to
            # end.
            if visit == self._visit:
                self._end_epoch()
        self.reached("over")

    def _end_epoch(self) -> None:
        # Loaders made in an epoch end with it. Those outside live on, and forget its passes.
        self._tracks = {place: t for place, t in self._tracks.items() if place[0] is None}
        for track in self._tracks.values():
            track.end_epoch()
        self.epoch += 1
        self._epoch_used = False
        self._epoch_ended()

    def add(self, track: LoaderTrack) -> None:
        """Follow a loader that has just been made, from where it was when the run was saved.

        Raises:
            CheckpointError: the loader differs from the one that was saved.
        """
        where, made = self.here, Counter(epoch for epoch, _ in self._tracks)
        place = where, made[where]
        # Loaders made in an epoch are numbered after those outside, and alike in every epoch: each
        # epoch's first loader has the same seeds but for the pass.
        track.number = place[1] if where is None else made[None] + place[1]
        # The position is unchanged until the check has passed: a script may catch the error.
        if saved := self._waiting.get(place) or self._expected.get(place):
            _check_loader(saved, track, self._allow_changed)
        if saved := self._waiting.pop(place, None):
            track.go_to(saved.passes, self._allow_changed)
        elif saved := self._expected.pop(place, None):
            track.expect(saved.passes)
        self._tracks[place] = track
        track.position = self

    def check(self, batch: ShardedBatch) -> None:
        """Refuse a batch that was read before the run was moved elsewhere by a load.

        Raises:
            ValueError: the batch's pass was begun before the load.
        """
        if any(part.data_pass and part.data_pass.abandoned for part in batch.read):
            raise ValueError(
                "this batch belongs to a pass over the data that was begun before trainer.load: "
                "begin a new pass, which goes on where the checkpoint was made"
            )

    def has_used(self, batch: ShardedBatch) -> bool:
        """Whether a step has already used this batch."""
        return all(map(_is_used, batch.read))

    def repeats_part(self, batch: ShardedBatch) -> bool:
        """Whether steps have used the batches of some loaders in it, and not those of others."""
        return any(map(_is_used, batch.read)) and not self.has_used(batch)

    def is_at_an_end(self) -> bool:
        """Whether a pass has been used up, and the script has not noticed yet."""
        return any(each.used >= each.end for each in self._under_way())

    def is_between_batches(self, batch: ShardedBatch) -> bool:
        """Whether no other loader has a batch waiting to be used once this batch's step is done."""
        tracks = self._tracks.values()
        others = [track for track in tracks if not any(map(track.made, batch.read))]
        return not any(p.given > p.used for track in others for p in track.under_way(self.here))

    def note_step(self, batch: ShardedBatch) -> None:
        """Note that a step has used a batch."""
        self.step += 1
        self._epoch_used, self._exhausted = batch.data_pass is None, True
        for part in batch.read:
            if part.data_pass is not None:
                # A script may use a batch twice, which does not take the pass back.
                part.data_pass.used = max(part.stop, part.data_pass.used)
                part.data_pass.joint |= len(batch.read) > 1
                if part.data_pass.note_used is not None:
                    part.data_pass.note_used(part)
        if self._saved_as_done and self.inside:
            self._saved_as_done = False
            _log.warning(
                "the checkpoint before step %d was made between two loops of epoch %d, after a "
                "pass had come to its end: a run that goes on from it begins with epoch %d. Save "
                "in a loop, or at the end of an epoch",
                self.step,
                self.epoch,
                self.epoch + 1,
            )

    def note_pass_end(self, *, broken_off: bool) -> None:
        """Note that a pass of which samples were used has ended."""
        self._epoch_used, self._exhausted = True, not broken_off

    def _under_way(self) -> list[DataPass]:
        return [p for track in self._tracks.values() for p in track.under_way(self.here)]

    @property
    def _is_epoch_done(self) -> bool:
        """Whether a run that goes on from here begins with the next epoch."""
        if not (self.inside and self._epoch_used):
            return False
        # A loader that is read beside another may well go on in the next epoch.
        return not any(not p.joint or p.given > p.used for p in self._under_way())

    def note_save(self) -> None:
        """Note that the run was saved here."""
        self._saved_as_done = self._is_epoch_done

    def to_json(self) -> dict[str, Any]:
        """Write down where a run that is resumed from here continues."""
        done = self._is_epoch_done
        # Saved loaders that the script has not made again yet are kept as they were.
        loaders = list(self._waiting.values())
        for place, track in self._tracks.items():
            passes = track.saved(epoch_done=done)
            loaders.append(SavedLoader(*place, track.number, track.size, passes))
        position = msgspec.to_builtins(loaders)
        return {"step": self.step, "epoch": self.epoch + done, "position": position}

    def check_fits(self, saved: Mapping[str, Any], allow_changed: Collection[str]) -> None:
        """Compare the loaders that exist with those of a saved position.

        Raises:
            CheckpointError: one of them differs from the one that was saved.
        """
        for place, loader in _by_place(saved).items():
            if place in self._tracks:
                _check_loader(loader, self._tracks[place], allow_changed)

    def expect(self, saved: Mapping[str, Any]) -> None:
        """Refuse loaders that differ from those of a saved position, which the script comes to."""
        self._expected = _by_place(saved)

    def go_to(self, saved: Mapping[str, Any], allow_changed: Collection[str]) -> None:
        """Continue where `to_json` was called; loaders that are made later will follow.

        Args:
            saved: what `to_json` wrote, checked by `check_fits`.
            allow_changed: the keys of `PROMISES` that may differ.
        """
        self.step, self.epoch = saved["step"], saved["epoch"]
        self._epoch_used = False
        self._visit += 1
        self._allow_changed = tuple(allow_changed)
        self._waiting, self._expected = _by_place(saved), {}
        for place, track in list(self._tracks.items()):
            if place[0] is not None:
                # Made in an epoch that begins again, where the script makes another in its place.
                track.restart(0)
                del self._tracks[place]
            elif place in self._waiting:
                track.go_to(self._waiting.pop(place).passes, allow_changed)
            else:
                track.restart(self.epoch)


def _is_used(batch: ShardedBatch) -> bool:
    return batch.data_pass is not None and batch.stop <= batch.data_pass.used


def _check_loader(saved: SavedLoader, track: LoaderTrack, allow_changed: Collection[str]) -> None:
    saved.size.check_same(track.size, allow_changed)
    name = "the order and random numbers of loader"
    check_same("dataset", saved.loader, track.number, allow_changed, name)


def _by_place(saved: Mapping[str, Any]) -> dict[tuple[int | None, int], SavedLoader]:
    loaders = msgspec.convert(saved["position"], list[SavedLoader])
    return {(each.made_in_epoch, each.number): each for each in loaders}


Count = Annotated[int, Meta(ge=0, lt=1 << 62)]
"""Any whole number of a checkpoint: steps and sizes fit, and the sum of two is below 2**63."""
BATCH_FUNCTION = "batches from a function"
"""`LoaderSize.kind` of a loader whose batches a function of the script makes."""
WHOLE = 1 << 60
"""Stands for all of a pass whose length is only known once its order is drawn, or it is read."""
_PLAIN = "samples by number"
STREAM = "the stream "
"""Begins `LoaderSize.kind` of streams."""


class LoaderSize(Struct, frozen=True, kw_only=True):
    """Everything that determines the batches of a loader's passes, apart from the seed."""

    samples: Count
    """Number of samples in the data set."""
    batch_size: Annotated[int, Meta(ge=1, lt=1 << 62)]
    drop_last: bool = False
    shuffle: bool = False
    lengths: str = ""
    """A digest of the samples' lengths, if batches are made by length; otherwise empty."""
    subset: str = ""
    """A digest of which samples of a larger data set these are, if they are a `Subset`."""
    kind: str = ""
    """What says which samples come, where the length of a pass follows from it; else empty."""

    def batches(self, samples: int) -> int:
        """Return how many batches so many samples of a pass make."""
        whole, rest = divmod(samples, self.batch_size)
        return whole + bool(rest and not self.drop_last)

    def check_same(self, now: LoaderSize, allow_changed: Collection[str]) -> None:
        """Refuse a loader that differs from this saved one.

        Raises:
            CheckpointError: the loaders differ.
        """
        rows: list[tuple[str, str, object, object]] = [
            ("dataset", "a loader of", self.kind or _PLAIN, now.kind or _PLAIN),
            ("dataset", "a data set of length", self.samples, now.samples),
            ("batch_size", "batch_size", self.batch_size, now.batch_size),
            ("batch_size", "drop_last", self.drop_last, now.drop_last),
            ("dataset", "shuffle", self.shuffle, now.shuffle),
            ("dataset", "lengths of samples, as a digest", self.lengths, now.lengths),
            ("dataset", "a subset of samples, as a digest,", self.subset, now.subset),
        ]
        # Batches by length are shuffled as batches, so their size decides the order of the samples.
        if self.lengths:
            name = "batches by length, of batch_size"
            rows.insert(3, ("dataset", name, self.batch_size, now.batch_size))
        for what, name, saved, value in rows:
            check_same(what, saved, value, allow_changed, name)


class StreamState(Struct, frozen=True):
    """Where a stream stands at a place of a pass, as JSON."""

    own: Any
    """What the stream says itself."""
    generators: Annotated[str, Meta(pattern=r"\A([0-9a-f]{2})*\Z")]
    """The states of the generators that it may draw from."""
    read: int = 0
    """A digest of the samples of the pass up to there."""


class SavedPass(Struct, frozen=True, array_like=True):
    """A pass that a resumed script comes to."""

    number: Count
    used: Count
    """How many of its samples were used."""
    order: str = ""
    """A digest of its order; empty if that follows from the seed alone."""
    state: StreamState | None = None
    """Where its stream stood, if it says so."""

    def __post_init__(self) -> None:
        if self.state is not None:
            from_json(self.state.own)


class SavedPasses(Struct, frozen=True):
    """The passes of a loader that a resumed script comes to."""

    first: Count
    """Number of the first."""
    empty: Count
    """How many come empty, before those that were begun."""
    begun: list[SavedPass]
    ended: tuple[Count, Count] | None = None
    """Samples of the last pass of a stream that ended, and the devices that read it."""
    length: Count = 0
    """Length of the last pass, where the data set has grown or shrunk before it; else 0."""
    last: tuple[Count, Count, int] | None = None
    """The last used batch of a function: its pass, its end in the pass, its digest. Of a stream,
    its pass, a place in it, and a digest of the samples up to there."""

    @property
    def were_used(self) -> bool:
        """Whether anything of them was used."""
        return self.empty > 0 or any(each.used for each in self.begun)


class SavedLoader(Struct, frozen=True):
    """A loader in a checkpoint."""

    made_in_epoch: Count | None
    """The epoch in which it was made; None outside of any."""
    number: Count
    """Which one it is of those that were made there."""
    loader: Count
    """Its number in the run."""
    size: LoaderSize
    passes: SavedPasses


class LoaderTrack:
    """Records which passes a loader has been through, and which come next.

    Args:
        size: what determines the loader's batches.
        first_pass: number of its first pass.
    """

    def __init__(self, size: LoaderSize, first_pass: int) -> None:
        self.size = size
        self.number = 0
        """Number of the loader in the run; it is part of the loader's seeds."""
        self._next = first_pass
        self._empty = 0
        """How many passes come empty, before those of ``_coming``."""
        self._coming: list[SavedPass] = []
        """The passes that were partly used before the run resumed."""
        self._used_up = 0
        """How many passes were used up outside the epochs, before those of ``_passes``."""
        self._passes: list[DataPass] = []
        self._length = 0
        """`SavedPasses.length`."""
        self._first: tuple[int, int, int] | None = None
        """As `SavedPasses.last`, for the first batch of a stream's pass."""
        self._has_resumed = False
        """Whether no pass has begun since the run resumed without answers."""
        self._last: tuple[int, int, int] | None = None
        self.orders: dict[int, str] = {}
        """Digests of the orders of passes that are expected, where a record answers the script."""
        self._ended: tuple[int, int] | None = None
        self._allow_changed: Collection[str] = ()
        self.pass_read: Callable[[int], None] = lambda samples: None
        """Called with the samples of a pass of a stream that has come to its end."""
        self.position: Position | None = None
        """What follows it, if a run may go on in the middle of a pass; it is told of their ends."""

    def start_pass(self) -> DataPass:
        """Begin the next pass, without the samples that were used before the run resumed."""
        coming = SavedPass(self._next, 0)
        if self._empty:
            self._empty -= 1
            coming = SavedPass(self._next, WHOLE)
        elif self._coming:
            coming = self._coming.pop(0)
        self._next = coming.number + 1
        # Passes outside the epochs would pile up in a script without epochs: used up ones are
        # merely counted. Only the oldest go, so that the order of the rest is kept.
        while self._passes and self._passes[0].epoch is None and self._is_used_up(self._passes[0]):
            del self._passes[0]
            self._used_up += 1
        epoch = None if self.position is None else self.position.here
        used = coming.used
        order = coming.order or self.orders.get(coming.number, "")
        begun = DataPass(coming.number, used, epoch, WHOLE, given=used, order=order)
        if self.size.kind == BATCH_FUNCTION:
            begun.note_used = self.note_used
        elif self.size.kind.startswith(STREAM):
            begun.note_used = self.note_read
        if coming.state is not None:
            begun.states[used] = coming.state
        self._passes.append(begun)
        if self.position is not None:
            self.position.reached("pass")
        return begun

    @property
    def awaits(self) -> bool:
        """Whether a pass is still to come of which some was used before the run resumed."""
        return SavedPasses(self._next, self._empty, self._coming).were_used

    def settle(self, this: DataPass, length: int, order: str) -> None:
        """Note how long a pass is, now that its order is known.

        Args:
            this: a pass of which nothing was handed out yet.
            length: how many places it has; `WHOLE` if only its end will tell.
            order: a digest of its order; empty if that follows from the seed alone.

        Raises:
            CheckpointError: the saved run had another order in this pass.
        """
        is_plain = not self.size.kind
        if is_plain and self._has_resumed and self._differs_in_length(this, length, order):
            raise CheckpointError(
                f"in pass {this.number} the data set has {length} samples, and had "
                f"{self._length or 'others'} in the last pass of the run that was saved: expected "
                f"the same growth. Bring the data set to the length that it had before the pass "
                f'begins; or give allow_changed=["dataset"] to trainer.load; then '
                f"{PROMISES['dataset']}"
            )
        if this.order not in ("", order):
            raise CheckpointError(
                f"in pass {this.number} the sampler gave another order than in the run that was "
                f"saved: expected the same, of which some places are used already. An "
                f"order may depend on the generators of PyTorch, Python and NumPy, on one that the "
                f"sampler holds, and on set_epoch(epoch), but not on passes before it. To go on "
                f'with another order, give allow_changed=["dataset"] to trainer.load; then '
                f"{PROMISES['dataset']}"
            )
        if is_plain:
            self._length = 0 if length == self.size.samples else length
        self._has_resumed &= not is_plain  # else `last_to_check` asks
        this.order = order
        this.used = this.given = min(this.used, length)
        this.end = self._end_of(length, this.used)

    def _differs_in_length(self, this: DataPass, length: int, order: str) -> bool:
        """Whether a data set that had grown or shrunk has another length after a resume."""
        if this.used:
            return this.order != order
        # The length of a pass that no run has begun is not known; the first one is a wrong one.
        return bool(self._length) and length == self.size.samples

    def _end_of(self, length: int, used: int) -> int:
        if length == WHOLE or not self.size.drop_last:
            return length
        # Counted from `used`: the batch size may have been changed on purpose since then.
        return length - (length - used) % self.size.batch_size

    def end(self, this: DataPass, *, broken_off: bool) -> None:
        """Note that a pass has ended: no more of its batches will be used."""
        # A loop that breaks after its last batch was not cut short.
        this.over, this.broken_off = True, broken_off and this.used < this.end
        if not this.broken_off:
            self._last = self._first or self._last
            this.states.clear()
        if self.position is None or this.abandoned:
            return
        if this.epoch is not None and this.epoch != self.position.epoch:
            # An iterator of an earlier epoch, which the script has held until now. It says nothing
            # about the epoch that the run is in.
            self._passes = [each for each in self._passes if each is not this]
        elif this.used:
            self.position.note_pass_end(broken_off=this.broken_off)

    def note_length(self, samples: int, devices: int) -> None:
        """Note how long a pass of a stream was, which every device has read whole.

        Raises:
            CheckpointError: on another number of devices, before the run resumed, it was another.
        """
        if self._ended is not None and self._ended[1] != devices:
            was, before = self._ended
            name = (
                f"passes of {self.size.kind} of which each device read (there are {devices} now, "
                f"and were {before}; does the stream split its data by WORLD_SIZE?)"
            )
            check_same("dataset", was, samples, self._allow_changed, name)
        self._ended = samples, devices
        self.pass_read(samples)

    def made(self, batch: ShardedBatch) -> bool:
        """Whether a batch comes from one of this loader's recorded passes."""
        return any(each is batch.data_pass for each in self._passes)

    def under_way(self, epoch: int | None) -> list[DataPass]:
        """The passes of this epoch that have not ended."""
        return [p for p in self._passes if p.epoch == epoch and not p.over]

    def go_to(self, saved: SavedPasses, allow_changed: Collection[str] = ()) -> None:
        """Continue with the passes that `saved` returned; those under way become unusable."""
        for each in self._passes:
            each.abandoned = True
        self._passes = []
        self._used_up = 0
        self._next, self._empty = saved.first, saved.empty
        self._ended, self._allow_changed = saved.ended, tuple(allow_changed)
        self._coming = list(saved.begun)
        self._length, self._last = saved.length, saved.last
        self._has_resumed = True
        # With another seed or another data set the order is another one, as was agreed to.
        if {"seed", "dataset"} & set(allow_changed):
            self._coming = [replace(each, order="") for each in self._coming]
            self._length, self._last, self._has_resumed = 0, None, False

    def expect(self, saved: SavedPasses) -> None:
        """Compare the passes to which the script comes by itself with those of the run before."""
        self.orders = {each.number: each.order for each in saved.begun}
        self._ended = saved.ended
        if self.size.kind.startswith(STREAM):
            self._last, self._has_resumed = saved.last, True

    def restart(self, first_pass: int) -> None:
        """Start over with pass ``first_pass``; passes under way become unusable."""
        self.go_to(SavedPasses(first_pass, 0, []))

    def saved(self, *, epoch_done: bool) -> SavedPasses:
        """Return the passes that a resumed script will go through.

        Args:
            epoch_done: whether the resumed run begins with the next epoch, rather than with this
                one again.
        """
        # Passes of an epoch that is done are not asked for again; those outside the epochs always
        # are, because the script runs again from its beginning.
        passes = [p for p in self._passes if not (epoch_done and p.epoch is not None and p.over)]
        known = [self._saved_pass(each) for each in passes]
        # If empty passes are still to come, all passes since the run resumed were empty, too.
        if self._empty:
            first, empty, known = self._next - len(known), len(known) + self._empty, []
        else:
            first, empty = (known[0].number if known else self._next), 0
        # Passes of epochs that are done lie between the last one and the next, and are not listed:
        # the next one is, so that it keeps its number, and with it its order.
        if known and not self._coming and known[-1].number + 1 != self._next:
            known.append(SavedPass(self._next, 0))
        empty += self._used_up
        begun = [*known, *self._coming]
        about = self._ended, self._length, self._last
        return SavedPasses(first - self._used_up, empty, begun, *about)

    def note_used(self, batch: ShardedBatch) -> None:
        """Note the last batch of a function that a step has used."""
        self._last = batch.pass_number, batch.stop, batch.data_digest

    def note_read(self, batch: ShardedBatch) -> None:
        """Note what was read of a stream up to a batch that a step has used."""
        assert batch.data_pass is not None
        if isinstance(state := batch.data_pass.states.get(batch.stop), StreamState):
            self._last = batch.pass_number, batch.stop, state.read
            # To tell whether the next pass is what it was, a whole one is too long to be read.
            self._first = self._last if batch.stop == batch.samples else self._first

    def last_to_check(self) -> tuple[int, int, int] | None:
        """The last batch used before the run resumed, once: the function must make the same."""
        has_resumed, self._has_resumed = self._has_resumed, False
        # Another batch size was agreed to, and reads other samples for the digest.
        is_same = has_resumed and "batch_size" not in self._allow_changed
        return self._last if is_same else None

    def _saved_pass(self, this: DataPass) -> SavedPass:
        if self._is_used_up(this):
            return SavedPass(this.number, WHOLE)
        if not this.used:
            return SavedPass(this.number, 0)
        state: Any = this.states.get(this.used)
        own = None if state is None or state.own is None else state
        return SavedPass(this.number, this.used, this.order, own)

    def end_epoch(self) -> None:
        """Forget the passes of an epoch that is done."""
        self._passes = [p for p in self._passes if p.epoch is None or not p.over]

    def _is_used_up(self, this: DataPass) -> bool:
        """Whether a pass is empty when a resumed script comes to it.

        A pass that was broken off outside the epochs continues, unless another pass followed: the
        script may have been interrupted rather than have left the loop on purpose.
        """
        inside = self.position is not None and self.position.inside
        chosen = not this.broken_off or inside or this is not self._passes[-1]
        return this.over and this.used > 0 and chosen
