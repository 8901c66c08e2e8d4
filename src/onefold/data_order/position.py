"""Tracks the position of a run: its step, its epoch, and the used part of each loader.

`Position` counts steps and epochs. `LoaderTrack` records the passes of a loader (iterations over
its data) that are done, and those that come next.

Note: what counts as done
-------------------------
A batch counts as used when its step is done, not when a loader yields it: prefetched batches are
read again after a resume. An epoch counts as done if a pass over a data set has ended, or was left
early, since the epoch's last step. For batches that the script makes itself, nothing of this is
known; an epoch then counts as done once it contains a step. If the script leaves both the pass and
the loop over epochs early, it may have been interrupted: the epoch then continues in the middle of
the pass, in a resumed run and in the script's next loop.

Note: what a resumed script sees
--------------------------------
A resumed script runs again from its beginning, and then from the beginning of its current epoch. It
therefore requests passes that are already done there. These passes are empty in the resumed run;
passes without a used batch are complete. A loader is identified by the epoch of its creation (or
none), and by its number there.
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
from onefold.core.encoding import Count, from_json
from onefold.core.settings import PROMISES, check_same
from onefold.data_order.order import WHOLE, LoaderSize
from onefold.errors import CheckpointError
from onefold.system.process import ctrl_c_later

__all__ = [
    "BATCH_FUNCTION",
    "STREAM",
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
"""Maps the numbers of loader and pass and the end of the previous batch to the next used batch."""
Reached = Literal["epoch", "pass", "rest", "over"]
"""A point that a loop of the script reaches: the start of an epoch or pass, of the rest of a pass
that the saved run used, or the end of its epochs."""


class Position:
    """Counts the steps and epochs of a run, and tracks its loaders.

    Args:
        epoch_ended: called after each epoch.
    """

    def __init__(self, epoch_ended: Callable[[], None] = lambda: None) -> None:
        self._epoch_ended = epoch_ended
        self.step = 0
        """Number of completed steps."""
        self.epoch = 0
        """Number of the current epoch, or of the next one between epochs."""
        self.inside = False
        """Whether the run is inside an epoch."""
        # Whether the epoch counts as done if it ends now, and whether it also does after a `break`.
        self._epoch_used = False
        self._exhausted = False
        # Whether the last checkpoint counted the epoch as done; another step in it disproves that.
        self._saved_as_done = False
        # How often a load moved the run: a loop over epochs that started before a load must not
        # count epochs.
        self._visit = 0
        # Whether a loop began the current epoch, and whether another one continues it.
        self._has_begun = self._has_returned = False
        # The existing loaders, and the saved ones that the script has not created again yet. Keys:
        # epoch of the loader's creation (None: outside), and its number there. Loaders in
        # `_expected` are only compared: during replay the script itself moves them to their place.
        self._tracks: dict[tuple[int | None, int], LoaderTrack] = {}
        self._waiting: dict[tuple[int | None, int], SavedLoader] = {}
        self._expected: dict[tuple[int | None, int], SavedLoader] = {}
        self._allow_changed: Collection[str] = ()
        self.reached: Callable[[Reached], None] = lambda where: None
        """Called when a loop of the script reaches one of these points."""
        self.replaying: Callable[[], bool] = lambda: False
        """Whether the script is replaying completed steps, so that no batch is read."""
        self.next_batch: NextBatch = lambda loader, number, given: None
        """Returns the end and size of the next batch of a pass that a step used, during replay."""

    @property
    def awaits(self) -> bool:
        """Whether a resumed script has not yet reached some pass that the saved run used."""
        waiting = any(each.passes.were_used for each in self._waiting.values())
        return waiting or any(track.awaits for track in self._tracks.values())

    @property
    def here(self) -> int | None:
        """Number of the current epoch; None outside of epochs."""
        return self.epoch if self.inside else None

    def epochs(self, number: int) -> Iterator[int]:
        """Yield the epochs from the run's position up to ``number``, and count them."""
        if self.epoch >= number > 0 == self._visit and not self.replaying():
            _log.warning(
                "trainer.epochs(%d) has nothing to do: the run has finished %d. The number counts "
                "from the first epoch of the run",
                number,
                self.epoch,
            )
        while self.epoch < number:
            self.reached("epoch")
            if self._has_begun:
                self._return()
            epoch, visit, self._has_begun = self.epoch, self._visit, True
            self.inside, self._epoch_used, self._saved_as_done = True, False, False
            try:
                yield epoch
            except GeneratorExit:
                self.inside = False
                # The loop ended by an exception or a `break`. In the middle of a pass this does not
                # end the epoch: see the note on what counts as done.
                if visit == self._visit and self._epoch_used and self._exhausted:
                    self._end_epoch()
                raise
            self.inside = False
            # If a load moved the run meanwhile, this generator must no longer end that epoch.
            if visit == self._visit:
                self._end_epoch()
        self.reached("over")

    def _return(self) -> None:
        """Prepare the rest of an epoch that a loop left, as a load would.

        The loop goes through the passes of the epoch again, which have only their unused samples.
        """
        self._has_returned, were_used = True, False
        for place, track in list(self._tracks.items()):
            passes = track.turn_back(self.epoch)
            were_used |= passes.were_used
            if place[0] is not None:
                self._waiting[place] = SavedLoader(*place, track.number, track.size, passes)
                del self._tracks[place]
        if were_used:
            _log.warning(
                "epoch %d continues with the batch after step %d, because a loop left it there; a "
                "loader that was created since begins a new pass",
                self.epoch,
                self.step,
            )

    def _end_epoch(self) -> None:
        with ctrl_c_later():
            # Loaders created in the epoch end with it. The others forget its passes.
            self._tracks = {place: t for place, t in self._tracks.items() if place[0] is None}
            for track in self._tracks.values():
                track.end_epoch()
            self.epoch += 1
            self._epoch_used = self._has_begun = self._has_returned = False
            self._epoch_ended()

    def add(self, track: LoaderTrack) -> None:
        """Track a new loader, starting at its position in the saved run.

        Raises:
            CheckpointError: the loader differs from the saved one.
        """
        where, made = self.here, Counter(epoch for epoch, _ in self._tracks)
        place = where, made[where]
        # Number loaders created in an epoch after those outside, and identically in every epoch:
        # the first loader of each epoch has the same seeds, apart from the pass number.
        track.number = place[1] if where is None else made[None] + place[1]
        if self._has_returned and (left := self._waiting.get(place)) and left.size != track.size:
            del self._waiting[place]  # the script has changed this loader on purpose
        # Check before changing the position: a script may catch the error.
        if saved := self._waiting.get(place) or self._expected.get(place):
            _check_loader(saved, track, self._allow_changed)
        if saved := self._waiting.pop(place, None):
            track.go_to(saved.passes, self._allow_changed)
        elif saved := self._expected.pop(place, None):
            track.expect(saved.passes)
        self._tracks[place] = track
        track.position = self

    def check(self, batch: ShardedBatch) -> None:
        """Refuse a batch that was read before a load moved the run.

        Raises:
            ValueError: the batch's pass started before the load.
        """
        if any(part.data_pass and part.data_pass.abandoned for part in batch.read):
            raise ValueError(
                "this batch belongs to a pass that started before trainer.load, or in a loop over "
                "trainer.epochs that was left before its end. Start a new pass, which continues "
                "at the run's position"
            )

    def has_used(self, batch: ShardedBatch) -> bool:
        """Whether a step already used this batch."""
        return all(map(_is_used, batch.read))

    def repeats_part(self, batch: ShardedBatch) -> bool:
        """Whether steps used the parts of some loaders in this batch, but not those of others."""
        return any(map(_is_used, batch.read)) and not self.has_used(batch)

    def is_at_an_end(self) -> bool:
        """Whether a pass is used up, but the script's loop has not ended yet."""
        return any(each.used >= each.end for each in self._under_way())

    def is_between_batches(self, batch: ShardedBatch) -> bool:
        """Whether, after this batch's step, no other loader has a yielded but unused batch."""
        tracks = self._tracks.values()
        others = [track for track in tracks if not any(map(track.made, batch.read))]
        return not any(p.given > p.used for track in others for p in track.under_way(self.here))

    def note_step(self, batch: ShardedBatch) -> None:
        """Record that a step used a batch."""
        self.step += 1
        self._epoch_used, self._exhausted = batch.data_pass is None, True
        for part in batch.read:
            if part.data_pass is not None:
                # Take the maximum: a script may use a batch twice, which does not rewind the pass.
                part.data_pass.used = max(part.stop, part.data_pass.used)
                part.data_pass.joint |= len(batch.read) > 1
                if part.data_pass.note_used is not None:
                    part.data_pass.note_used(part)
        if self._saved_as_done and self.inside:
            self._saved_as_done = False
            _log.warning(
                "the checkpoint before step %d was saved between two loops of epoch %d, after a "
                "pass had ended: a run resumed from it starts with epoch %d. Save inside a loop, "
                "or at the end of an epoch",
                self.step,
                self.epoch,
                self.epoch + 1,
            )

    def note_pass_end(self, *, broken_off: bool) -> None:
        """Record the end of a pass whose samples were used."""
        self._epoch_used, self._exhausted = True, not broken_off

    def _under_way(self) -> list[DataPass]:
        return [p for track in self._tracks.values() for p in track.under_way(self.here)]

    @property
    def _is_epoch_done(self) -> bool:
        """Whether a run resumed from here starts with the next epoch."""
        if not (self.inside and self._epoch_used):
            return False
        # Loaders read together (joint) may continue in the next epoch.
        return not any(not p.joint or p.given > p.used for p in self._under_way())

    def note_save(self) -> None:
        """Record that the run was saved at this position."""
        self._saved_as_done = self._is_epoch_done

    def to_json(self) -> dict[str, Any]:
        """Return the position of a run that is saved now and resumed."""
        done = self._is_epoch_done
        # Keep saved loaders that the script has not created again yet unchanged.
        loaders = list(self._waiting.values())
        for place, track in self._tracks.items():
            passes = track.saved(epoch_done=done)
            loaders.append(SavedLoader(*place, track.number, track.size, passes))
        position = msgspec.to_builtins(loaders)
        return {"step": self.step, "epoch": self.epoch + done, "position": position}

    def check_fits(self, saved: Mapping[str, Any], allow_changed: Collection[str]) -> None:
        """Compare the existing loaders with those of a saved position.

        Raises:
            CheckpointError: a loader differs from the saved one.
        """
        for place, loader in _by_place(saved).items():
            if place in self._tracks:
                _check_loader(loader, self._tracks[place], allow_changed)

    def expect(self, saved: Mapping[str, Any]) -> None:
        """Set the saved position to compare with each loader that the script creates."""
        self._expected = _by_place(saved)

    def go_to(self, saved: Mapping[str, Any], allow_changed: Collection[str]) -> None:
        """Continue at the position of `to_json`; loaders created later follow.

        Args:
            saved: result of `to_json`, checked by `check_fits`.
            allow_changed: the keys of `PROMISES` that may differ.
        """
        self.step, self.epoch = saved["step"], saved["epoch"]
        self._epoch_used = self._has_begun = self._has_returned = False
        self._visit += 1
        self._allow_changed = tuple(allow_changed)
        self._waiting, self._expected = _by_place(saved), {}
        for place, track in list(self._tracks.items()):
            if place[0] is not None:
                # The loader's epoch starts again, and the script will create a new loader in it.
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


BATCH_FUNCTION = "batches from a function"
"""`LoaderSize.kind` of a loader whose batches come from a function of the script."""
STREAM = "the stream "
"""Prefix of `LoaderSize.kind` of streams."""


class StreamState(Struct, frozen=True):
    """State of a stream at a position in a pass, as JSON."""

    own: Any
    """State returned by the stream."""
    generators: Annotated[str, Meta(pattern=r"\A([0-9a-f]{2})*\Z")]
    """States of the generators that the stream may draw from."""
    read: int = 0
    """Digest of the pass's samples up to this position."""


class SavedPass(Struct, frozen=True, array_like=True):
    """A pass that a resumed script goes through."""

    number: Count
    used: Count
    """Number of used samples."""
    order: str = ""
    """Digest of the order; empty if the order follows from the seed alone."""
    state: StreamState | None = None
    """State of the stream, if it has any."""

    def __post_init__(self) -> None:
        if self.state is not None:
            from_json(self.state.own)


class SavedPasses(Struct, frozen=True):
    """The passes of a loader that a resumed script goes through."""

    first: Count
    """Number of the first pass."""
    empty: Count
    """Number of empty passes, before the passes in ``begun``."""
    begun: list[SavedPass]
    ended: tuple[Count, Count] | None = None
    """Samples of the stream's last complete pass, and the number of devices that read it."""
    length: Count = 0
    """Length of the last pass if the data set grew or shrank before it; otherwise 0."""
    last: tuple[Count, Count, int] | None = None
    """Last used batch of a function: its pass, its end in the pass, its digest. For a stream: a
    pass, a position in it, and a digest of the samples up to there."""

    @property
    def were_used(self) -> bool:
        """Whether any pass was used."""
        return self.empty > 0 or any(each.used for each in self.begun)


class SavedLoader(Struct, frozen=True):
    """A loader in a checkpoint."""

    made_in_epoch: Count | None
    """Epoch of the loader's creation; None outside of epochs."""
    number: Count
    """Number of the loader among those created in that epoch."""
    loader: Count
    """Number of the loader in the run."""
    size: LoaderSize
    passes: SavedPasses


class LoaderTrack:
    """Records the passes of a loader that are done or under way, and those that come next.

    Args:
        size: properties that determine the loader's batches.
        first_pass: number of the first pass.
    """

    def __init__(self, size: LoaderSize, first_pass: int) -> None:
        self.size = size
        self.number = 0
        """Number of the loader in the run; it determines the loader's seeds."""
        self._next = first_pass
        self._empty = 0
        """Number of empty passes, before the passes in ``_coming``."""
        self._coming: list[SavedPass] = []
        """Passes that were partly used before the run resumed."""
        self._used_up = 0
        """Number of passes used up outside of epochs, before the passes in ``_passes``."""
        self._passes: list[DataPass] = []
        self._length = 0
        """`SavedPasses.length`."""
        self._first: tuple[int, int, int] | None = None
        """Like `SavedPasses.last`, but for the first batch of a stream's pass."""
        self._has_resumed = False
        """Whether no pass has started since the run resumed without replay."""
        self._last: tuple[int, int, int] | None = None
        self.orders: dict[int, str] = {}
        """Digests of the expected orders by pass, if a record is replayed."""
        self._ended: tuple[int, int] | None = None
        self.keeps_state = True
        """Whether a stream's own state may be used; False after a pass that did without it."""
        self._allow_changed: Collection[str] = ()
        self.pass_read: Callable[[int], None] = lambda samples: None
        """Called after each complete pass of a stream, with its number of samples."""
        self.position: Position | None = None
        """The position to notify of the ends of passes, if a run may resume within a pass."""

    def start_pass(self) -> DataPass:
        """Start the next pass, without samples that were used before the run resumed."""
        coming = SavedPass(self._next, 0)
        if self._empty:
            self._empty -= 1
            coming = SavedPass(self._next, WHOLE)
        elif self._coming:
            coming = self._coming.pop(0)
        self._next = coming.number + 1
        # Drop used-up passes outside of epochs and count them: without epochs they would
        # accumulate. Count the oldest only, so that the remaining passes keep their order.
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
            self.position.reached("rest" if used else "pass")
        return begun

    @property
    def awaits(self) -> bool:
        """Whether some partly or fully used pass of the saved run has not started again yet."""
        return SavedPasses(self._next, self._empty, self._coming).were_used

    def settle(self, this: DataPass, length: int, order: str) -> None:
        """Record the length of a pass after its order is drawn.

        Args:
            this: a pass that has not yielded a batch yet.
            length: number of positions; `WHOLE` if only reading shows the end.
            order: digest of the order; empty if it follows from the seed alone.

        Raises:
            CheckpointError: the saved run had a different order in this pass.
        """
        is_plain = not self.size.kind
        if is_plain and self._has_resumed and self._differs_in_length(this, length, order):
            raise CheckpointError(
                f"pass {this.number} of the data set has {length} samples, but the last pass of "
                f"the saved run had {self._length or 'another number'}. Before the pass starts, "
                f"bring the data set to its previous length; or pass "
                f'allow_changed=["dataset"] to trainer.load; then {PROMISES["dataset"]}'
            )
        if this.order not in ("", order):
            raise CheckpointError(
                f"the sampler's order in pass {this.number} differs from the saved run, which has "
                f"already used a part of it. An order may depend on the generators of PyTorch, "
                f"Python and NumPy, on a generator that the sampler holds, and on "
                f"set_epoch(epoch), but not on earlier passes. To continue with another order, "
                f'pass allow_changed=["dataset"] to trainer.load; then {PROMISES["dataset"]}'
            )
        if is_plain:
            self._length = 0 if length == self.size.samples else length
        self._has_resumed &= not is_plain  # other kinds are checked by `last_to_check`
        this.order = order
        this.used = this.given = min(this.used, length)
        this.end = self._end_of(length, this.used)

    def _differs_in_length(self, this: DataPass, length: int, order: str) -> bool:
        """Whether a data set that grew or shrank has another length after a resume."""
        if this.used:
            return this.order != order
        # The length of a pass that no run started is unknown; only the initial length is wrong.
        return bool(self._length) and length == self.size.samples

    def _end_of(self, length: int, used: int) -> int:
        if length == WHOLE or not self.size.drop_last:
            return length
        # Count from `used`: the batch size may have been changed on purpose since then.
        return length - (length - used) % self.size.batch_size

    def end(self, this: DataPass, *, broken_off: bool) -> None:
        """Record the end of a pass: no more of its batches will be used."""
        # A loop that breaks after its last batch has not left the pass early.
        this.over, this.broken_off = True, broken_off and this.used < this.end
        if not this.broken_off:
            self._last = self._first or self._last
            this.states.clear()
        if self.position is None or this.abandoned:
            return
        if this.epoch is not None and this.epoch != self.position.epoch:
            # The script kept an iterator of an earlier epoch until now. Its end does not affect the
            # current epoch.
            self._passes = [each for each in self._passes if each is not this]
        elif this.used:
            self.position.note_pass_end(broken_off=this.broken_off)

    def note_length(self, samples: int, devices: int) -> None:
        """Record the length of a stream's pass after this device has read all of it.

        Raises:
            CheckpointError: the saved run, on another number of devices, read another length.
        """
        if self._ended is not None and self._ended[1] != devices:
            was, before = self._ended
            name = (
                f"passes of {self.size.kind} in which each device read (now {devices} devices, "
                f"before {before}; does the stream split its data by WORLD_SIZE?)"
            )
            check_same("dataset", was, samples, self._allow_changed, name)
        self._ended = samples, devices
        self.pass_read(samples)

    def made(self, batch: ShardedBatch) -> bool:
        """Whether a batch comes from one of this loader's tracked passes."""
        return any(each is batch.data_pass for each in self._passes)

    def under_way(self, epoch: int | None) -> list[DataPass]:
        """Return the passes of an epoch that have not ended."""
        return [p for p in self._passes if p.epoch == epoch and not p.over]

    def go_to(self, saved: SavedPasses, allow_changed: Collection[str] = ()) -> None:
        """Continue with saved passes; passes under way become unusable."""
        for each in self._passes:
            each.abandoned = True
        self._passes = []
        self._used_up = 0
        self._next, self._empty = saved.first, saved.empty
        self._ended, self._allow_changed = saved.ended, tuple(allow_changed)
        self._coming = list(saved.begun)
        self._length, self._last = saved.length, saved.last
        self._has_resumed = True
        # ``allow_changed`` accepts another seed or data set, and thereby another order.
        if {"seed", "dataset"} & set(allow_changed):
            self._coming = [replace(each, order="") for each in self._coming]
            self._length, self._last, self._has_resumed = 0, None, False

    def turn_back(self, epoch: int) -> SavedPasses:
        """Go through the passes of an epoch again, and return them; see `Position.epochs`."""
        others = [each for each in self._passes if each.epoch != epoch]
        self._passes = [each for each in self._passes if each.epoch == epoch]
        used_up, self._used_up = self._used_up, 0
        again = self.saved(epoch_done=False)
        if self._passes:
            self.go_to(again, self._allow_changed)
        self._passes, self._used_up = others, used_up
        return again

    def expect(self, saved: SavedPasses) -> None:
        """Set the saved passes to compare with the script's passes during replay."""
        self.orders = {each.number: each.order for each in saved.begun}
        self._ended = saved.ended
        if self.size.kind.startswith(STREAM):
            self._last, self._has_resumed = saved.last, True

    def restart(self, first_pass: int) -> None:
        """Start over at pass ``first_pass``; passes under way become unusable."""
        self.go_to(SavedPasses(first_pass, 0, []))

    def saved(self, *, epoch_done: bool) -> SavedPasses:
        """Return the passes that a resumed script will go through.

        Args:
            epoch_done: whether the resumed run starts with the next epoch instead of repeating the
                current one.
        """
        # A resumed script does not repeat passes of a done epoch, but it does repeat passes outside
        # of epochs, because it runs again from its beginning.
        passes = [p for p in self._passes if not (epoch_done and p.epoch is not None and p.over)]
        known = [self._saved_pass(each) for each in passes]
        # If empty passes are still to come, all passes since the resume were empty too.
        if self._empty:
            first, empty, known = self._next - len(known), len(known) + self._empty, []
        else:
            first, empty = (known[0].number if known else self._next), 0
        # Passes of done epochs come between the last listed pass and the next one. Only the next
        # one is listed, so that it keeps its number and therefore its order.
        if known and not self._coming and known[-1].number + 1 != self._next:
            known.append(SavedPass(self._next, 0))
        empty += self._used_up
        begun = [*known, *self._coming]
        about = self._ended, self._length, self._last
        return SavedPasses(first - self._used_up, empty, begun, *about)

    def note_used(self, batch: ShardedBatch) -> None:
        """Record the last batch of a function that a step used."""
        self._last = batch.pass_number, batch.stop, batch.data_digest

    def note_read(self, batch: ShardedBatch) -> None:
        """Record the digest of a stream up to the last batch that a step used."""
        assert batch.data_pass is not None
        if isinstance(state := batch.data_pass.states.get(batch.stop), StreamState):
            self._last = batch.pass_number, batch.stop, state.read
            # Keep the first batch: to check the next pass, a whole pass would take too long to
            # read.
            if batch.stop == batch.samples:
                self._first, self.keeps_state = self._last, state.own is not None

    def last_to_check(self) -> tuple[int, int, int] | None:
        """Return, once, the last batch used before the resume, which must be the same again."""
        has_resumed, self._has_resumed = self._has_resumed, False
        # If another batch size is accepted, the digest covers other samples.
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
        """Forget the passes of a completed epoch."""
        self._passes = [p for p in self._passes if p.epoch is None or not p.over]

    def _is_used_up(self, this: DataPass) -> bool:
        """Whether a pass is empty when a resumed script reaches it.

        A pass that was left early outside of epochs continues, unless another pass followed: the
        script may have been interrupted, instead of leaving the loop on purpose.
        """
        inside = self.position is not None and self.position.inside
        chosen = not this.broken_off or inside or this is not self._passes[-1]
        return this.over and this.used > 0 and chosen
