"""Where a run is: its step, its epoch, and how far each loader's samples have been used.

Note: what counts as done
-------------------------
A batch counts when its step is done, not when a loader hands it out: what was read ahead is read
again. An epoch counts as done when, since its last step, a pass over a data set has come to its
end or was broken off; batches that a script cuts itself tell nothing about that, so with them it
counts as done once a step was made in it. Where both the pass and the epochs are broken off, the
script may have been interrupted: then the epoch goes on in the middle of the pass.

A script that goes on runs again from its beginning, and then from the beginning of the epoch that
it was in. So the passes that it has already gone through there come again, empty; and those of
which no step used anything come again whole. A loader is known again by where it was made: outside
the epochs or in one, and as which there.
"""

from __future__ import annotations

import logging
from collections.abc import Collection, Iterator, Mapping
from dataclasses import asdict, dataclass, fields
from typing import Any

from onefold.core.batch import DataPass, ShardedBatch
from onefold.errors import CheckpointError

_log = logging.getLogger("onefold")

__all__ = ["PROMISES", "LoaderSize", "LoaderTrack", "Position", "check_same"]

PROMISES = {
    "seed": "dropout and augmentation come from other random numbers from here on, and the rest of "
    "this epoch from another order: some samples come twice in it and some not at all",
    "shards": "the parameters are no longer, bit for bit, those of the run that never stopped",
    "batch_size": "the rest of the run takes other steps than the run that never stopped; each "
    "sample still comes once an epoch",
    "dataset": "the rest of this epoch comes from another order: some samples come twice in it and "
    "some not at all",
    "clip_norm": "the rest of the run takes other steps than the run that never stopped",
    "optimizer": "the optimizer begins anew, without what it has gathered",
    "schedule": "the schedule begins anew",
}
"""What a run gives up that goes on with another one of these."""


def check_same(what: str, saved: object, now: object, changed: Collection[str], name: str) -> None:
    """Refuse what is not as it was saved, unless it was changed on purpose.

    Args:
        what: one of `PROMISES`.
        saved: in the checkpoint.
        now: in this run.
        changed: those of `PROMISES` that may differ.
        name: what to call it.

    Raises:
        CheckpointError: it differs; the message says how to load all the same and at what price.
    """
    if saved == now or what in changed:
        return
    raise CheckpointError(
        f"the checkpoint was saved with {name} {saved}, this run has {now}: expected the same. If "
        f'it was changed on purpose, trainer.load(..., changed=["{what}"]) or onefold run '
        f"--changed {what} goes on; then {PROMISES[what]}"
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class LoaderSize:
    """What makes the passes of a loader what they are."""

    samples: int
    """Of the data set."""
    batch_size: int
    drop_last: bool
    shuffle: bool
    lengths: str = ""
    """A digest of the samples' lengths where batches are made by them."""

    def check_same(self, now: LoaderSize, changed: Collection[str]) -> None:
        """Refuse another loader than was saved.

        Raises:
            CheckpointError: it is one.
        """
        samples = "a data set of length"
        check_same("dataset", self.samples, now.samples, changed, samples)
        check_same("batch_size", self.batch_size, now.batch_size, changed, "batch_size")
        if self.lengths:  # then the order depends on it
            name = "batches by length, of batch_size"
            check_same("dataset", self.batch_size, now.batch_size, changed, name)
        check_same("batch_size", self.drop_last, now.drop_last, changed, "drop_last")
        check_same("dataset", self.shuffle, now.shuffle, changed, "shuffle")
        check_same("dataset", self.lengths, now.lengths, changed, "lengths of samples, as a digest")


class LoaderTrack:
    """Which passes a loader has gone through, and which come next.

    Args:
        size: of the loader.
        first_pass: number of its first pass.
    """

    def __init__(self, size: LoaderSize, first_pass: int) -> None:
        self.size = size
        self.number = 0
        """Tells the loaders of a run apart; see the note on it."""
        self._next = first_pass
        self._empty = 0
        """So many passes come empty, before ``_coming``."""
        self._coming: list[list[int]] = []
        """Numbers of passes, and how many of their samples are left out."""
        self._used_up = 0
        """So many passes were gone through outside the epochs, before ``_passes``."""
        self._passes: list[DataPass] = []
        self._position: Position | None = None

    def follow(self, position: Position) -> None:
        """Tell ``position`` of passes that end."""
        self._position = position

    def begin(self) -> DataPass:
        """The next pass; ``used`` of its samples are left out."""
        number, used = self._next, 0
        if self._empty:
            self._empty -= 1
            used = self.size.samples
        elif self._coming:
            number, used = self._coming.pop(0)
        self._next = number + 1
        while self._passes and self._passes[0].epoch is None and self._is_used_up(self._passes[0]):
            del self._passes[0]
            self._used_up += 1
        epoch = None if self._position is None else self._position.here
        left_out = (self.size.samples - used) % self.size.batch_size if self.size.drop_last else 0
        end = self.size.samples - left_out
        self._passes.append(DataPass(number, used, epoch, end, given=used))
        return self._passes[-1]

    def end(self, this: DataPass, *, broken_off: bool) -> None:
        """No more batches of a pass will come."""
        this.over, this.broken_off = True, broken_off and this.used < this.end
        if self._position is None or this.abandoned:
            return
        if this.epoch is not None and this.epoch != self._position.epoch:
            # One of an epoch before, which was held until now.
            self._passes = [each for each in self._passes if each is not this]
        elif this.used:
            self._position.note_pass_end(broken_off=this.broken_off)

    def made(self, batch: ShardedBatch) -> bool:
        """Whether a batch is of one of the passes under way."""
        return any(each is batch.data_pass for each in self._passes)

    def is_ahead(self, epoch: int | None) -> bool:
        """Whether samples of a pass that was begun in this epoch wait to be used."""
        return any(p.given > p.used for p in self._under_way(epoch))

    def is_at_an_end(self, epoch: int | None) -> bool:
        """Whether all samples of a pass that was begun in this epoch have been used."""
        return any(p.used >= p.end for p in self._under_way(epoch))

    def _under_way(self, epoch: int | None) -> list[DataPass]:
        return [p for p in self._passes if p.epoch == epoch and not p.over]

    def go_to(self, saved: Mapping[str, Any]) -> None:
        """Begin with the passes that `to_json` told of; those under way can no longer be used."""
        for each in self._passes:
            each.abandoned = True
        self._passes = []
        self._used_up = 0
        self._next, self._empty = saved["first_pass"], saved["empty_passes"]
        self._coming = [[number, min(used, self.size.samples)] for number, used in saved["passes"]]

    def restart(self, first_pass: int) -> None:
        """Begin with a pass of this number; those under way can no longer be used."""
        self.go_to({"first_pass": first_pass, "empty_passes": 0, "passes": []})

    def to_json(self, *, epoch_done: bool) -> dict[str, Any]:
        """The passes that a script which goes on goes through next.

        Args:
            epoch_done: the run goes on with the next epoch, not with this one again.
        """
        passes = [p for p in self._passes if not (epoch_done and p.epoch is not None and p.over)]
        told = [[p.number, self.size.samples if self._is_used_up(p) else p.used] for p in passes]
        if self._empty:  # what was gone through since was empty as well
            first, empty, told = self._next - len(told), len(told) + self._empty, []
        else:
            first, empty = (told[0][0] if told else self._next), 0
        if told and not self._coming and told[-1][0] + 1 != self._next:
            told.append([self._next, 0])  # passes of epochs that are done lie between
        return {
            "first_pass": first - self._used_up,
            "empty_passes": empty + self._used_up,
            "passes": [*told, *self._coming],
        }

    def end_epoch(self) -> None:
        """Forget the passes of an epoch that is done."""
        self._passes = [p for p in self._passes if p.epoch is None or not p.over]

    def _is_used_up(self, this: DataPass) -> bool:
        """Whether a script that goes on finds nothing in a pass.

        One that was broken off outside the epochs may be gone on with, unless another followed: the
        script may have been interrupted rather than have chosen to.
        """
        inside = self._position is not None and self._position.inside
        chosen = not this.broken_off or inside or this is not self._passes[-1]
        return this.over and this.used > 0 and chosen


class Position:
    """Where a trainer is; goes through the epochs, and follows the loaders."""

    def __init__(self) -> None:
        self.step = 0
        """Steps done."""
        self.epoch = 0
        """The epoch that the run is in, or the next one."""
        self.inside = False
        """Whether it is in an epoch now."""
        self._epoch_used = False
        self._exhausted = False
        self._saved_as_done = False
        self._visit = 0
        self._made: dict[int | None, int] = {None: 0}
        self._tracks: dict[tuple[int | None, int], LoaderTrack] = {}
        self._waiting: dict[tuple[int | None, int], dict[str, Any]] = {}
        self._changed: Collection[str] = ()

    @property
    def here(self) -> int | None:
        """The epoch that the run is in now; None outside."""
        return self.epoch if self.inside else None

    def epochs(self, number: int) -> Iterator[int]:
        """Count epochs from where the run is up to ``number``."""
        while self.epoch < number:
            epoch, visit = self.epoch, self._visit
            self.inside, self._epoch_used, self._saved_as_done = True, False, False
            try:
                yield epoch
            except GeneratorExit:
                self.inside = False
                # An exception, or a break: if in the middle of a pass, the epoch is not done.
                if visit == self._visit and self._epoch_used and self._exhausted:
                    self._end_epoch()
                raise
            self.inside = False
            if visit == self._visit:  # or the run has gone to another place meanwhile
                self._end_epoch()

    def _end_epoch(self) -> None:
        self._made.pop(self.epoch, None)
        self._tracks = {place: t for place, t in self._tracks.items() if place[0] is None}
        for track in self._tracks.values():
            track.end_epoch()
        self.epoch += 1
        self._epoch_used = False

    def add(self, track: LoaderTrack) -> None:
        """Follow a loader that has just been made, from where it was when the run was saved.

        Raises:
            CheckpointError: it is another one than was saved.
        """
        where = self.here
        place = where, self._made.get(where, 0)
        track.number = place[1] if where is None else self._made[None] + place[1]
        if place in self._waiting:
            saved = self._waiting[place]
            _check_loader(saved, track, self._changed)
            track.go_to(saved)
            del self._waiting[place]
        self._made[where] = place[1] + 1
        self._tracks[place] = track
        track.follow(self)

    def check(self, batch: ShardedBatch) -> None:
        """Refuse a batch that was read before the run went elsewhere.

        Raises:
            ValueError: it was.
        """
        if batch.data_pass is not None and batch.data_pass.abandoned:
            raise ValueError(
                "this batch belongs to a pass over the data that was begun before trainer.load: "
                "begin a new pass, which goes on where the checkpoint was made"
            )

    def has_used(self, batch: ShardedBatch) -> bool:
        """Whether a step has used this batch before."""
        return batch.data_pass is not None and batch.stop <= batch.data_pass.used

    def is_at_an_end(self) -> bool:
        """Whether a pass has been used up and the script does not know it yet."""
        return any(track.is_at_an_end(self.here) for track in self._tracks.values())

    def is_between_batches(self, batch: ShardedBatch) -> bool:
        """Whether, after the step with this batch, no other loader's batch waits to be used."""
        others = [track for track in self._tracks.values() if not track.made(batch)]
        return not any(track.is_ahead(self.here) for track in others)

    def note_step(self, batch: ShardedBatch) -> None:
        """A batch has been used."""
        self.step += 1
        self._epoch_used, self._exhausted = batch.data_pass is None, True
        if batch.data_pass is not None:
            batch.data_pass.used = max(batch.stop, batch.data_pass.used)
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
        """A pass of which samples were used has come to its end."""
        self._epoch_used, self._exhausted = True, not broken_off

    def note_save(self) -> None:
        """The run was saved here."""
        self._saved_as_done = self.inside and self._epoch_used

    def to_json(self) -> dict[str, Any]:
        """Where a run goes on that is loaded from here."""
        done = self.inside and self._epoch_used
        told = list(self._waiting.values())
        for (where, number), track in self._tracks.items():
            passes = track.to_json(epoch_done=done)
            place = {"made_in_epoch": where, "number": number, "loader": track.number}
            told.append({**place, **asdict(track.size), **passes})
        return {"step": self.step, "epoch": self.epoch + done, "position": told}

    def check_fits(self, saved: Mapping[str, Any], changed: Collection[str]) -> None:
        """Compare the loaders there are with those of a saved position.

        Raises:
            CheckpointError: one of them is another than was saved.
        """
        for place, loader in _by_place(saved).items():
            if place in self._tracks:
                _check_loader(loader, self._tracks[place], changed)

    def go_to(self, saved: Mapping[str, Any], changed: Collection[str]) -> None:
        """Go to where `to_json` was called; loaders that are made later will follow.

        Args:
            saved: checked by `check_fits`.
            changed: those of `PROMISES` that may differ.
        """
        self.step, self.epoch = saved["step"], saved["epoch"]
        self._epoch_used = False
        self._visit += 1
        self._changed = tuple(changed)
        self._waiting = _by_place(saved)
        self._made = {None: self._made[None]}
        for place, track in list(self._tracks.items()):
            if place[0] is not None:
                track.restart(0)  # made in an epoch that begins again: others take its place
                del self._tracks[place]
            elif place in self._waiting:
                track.go_to(self._waiting.pop(place))
            else:
                track.restart(self.epoch)


def _check_loader(saved: Mapping[str, Any], track: LoaderTrack, changed: Collection[str]) -> None:
    _size_of(saved).check_same(track.size, changed)
    # Before loaders were numbered, all had the order and the random numbers of the first.
    name = "the order and random numbers of loader"
    check_same("dataset", saved.get("loader", 0), track.number, changed, name)


def _size_of(saved: Mapping[str, Any]) -> LoaderSize:
    known = {field.name for field in fields(LoaderSize)}
    return LoaderSize(**{name: value for name, value in saved.items() if name in known})


def _by_place(saved: Mapping[str, Any]) -> dict[tuple[int | None, int], dict[str, Any]]:
    return {(each["made_in_epoch"], each["number"]): each for each in saved["position"]}
