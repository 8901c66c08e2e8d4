"""Keeps track of where a run is: its step, its epoch, and how much each loader has been used.

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
those of which no step used anything come again whole. A loader is recognised by where it is made:
outside the epochs or in one, and as which one there.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Collection, Iterator, Mapping
from dataclasses import asdict, fields
from typing import Any, Literal

from onefold.core.batch import ShardedBatch
from onefold.reading.track import PROMISES, LoaderSize, LoaderTrack, check_same

_log = logging.getLogger("onefold")


__all__ = ["PROMISES", "LoaderSize", "LoaderTrack", "Position", "Reached", "check_same"]

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
        # How many loaders were made in each epoch, or outside (None): a loader's number there.
        self._made: dict[int | None, int] = {None: 0}
        # The loaders that exist, and the saved ones that the script has not made yet. Keys are the
        # epoch in which a loader was made (None: outside), and its number there.
        self._tracks: dict[tuple[int | None, int], LoaderTrack] = {}
        self._waiting: dict[tuple[int | None, int], dict[str, Any]] = {}
        self._changed: Collection[str] = ()
        self.reached: Callable[[Reached], None] = lambda where: None
        """Called where a loop of the script gets to one of these places."""

    @property
    def awaits(self) -> bool:
        """Whether a resumed script is still to come to a pass of which the saved run used some."""
        waiting = any(_was_begun(each) for each in self._waiting.values())
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
        self._made.pop(self.epoch, None)
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
        where = self.here
        place = where, self._made.get(where, 0)
        # Loaders made in an epoch are numbered after those outside, and alike in every epoch: each
        # epoch's first loader has the same seeds but for the pass.
        track.number = place[1] if where is None else self._made[None] + place[1]
        if place in self._waiting:
            saved = self._waiting[place]
            # The position is unchanged until the check has passed: a script may catch the error.
            _check_loader(saved, track, self._changed)
            track.go_to(saved, self._changed)
            del self._waiting[place]
        self._made[where] = place[1] + 1
        self._tracks[place] = track
        track.follow(self)

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
        return any(track.is_at_an_end(self.here) for track in self._tracks.values())

    def is_between_batches(self, batch: ShardedBatch) -> bool:
        """Whether no other loader has a batch waiting to be used once this batch's step is done."""
        tracks = self._tracks.values()
        others = [track for track in tracks if not any(map(track.made, batch.read))]
        return not any(track.is_ahead(self.here) for track in others)

    def note_step(self, batch: ShardedBatch) -> None:
        """Note that a step has used a batch."""
        self.step += 1
        self._epoch_used, self._exhausted = batch.data_pass is None, True
        for part in batch.read:
            if part.data_pass is not None:
                # A script may use a batch twice, which does not take the pass back.
                part.data_pass.used = max(part.stop, part.data_pass.used)
                part.data_pass.joint |= len(batch.read) > 1
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

    @property
    def _is_epoch_done(self) -> bool:
        """Whether a run that goes on from here begins with the next epoch."""
        under_way = any(track.holds_epoch(self.here) for track in self._tracks.values())
        return self.inside and self._epoch_used and not under_way

    def note_save(self) -> None:
        """Note that the run was saved here."""
        self._saved_as_done = self._is_epoch_done

    def to_json(self) -> dict[str, Any]:
        """Write down where a run that is resumed from here continues."""
        done = self._is_epoch_done
        # Saved loaders that the script has not made again yet are kept as they were.
        loaders = list(self._waiting.values())
        for (where, number), track in self._tracks.items():
            passes = track.to_json(epoch_done=done)
            place = {"made_in_epoch": where, "number": number, "loader": track.number}
            loaders.append({**place, **asdict(track.size), **passes})
        return {"step": self.step, "epoch": self.epoch + done, "position": loaders}

    def check_fits(self, saved: Mapping[str, Any], changed: Collection[str]) -> None:
        """Compare the loaders that exist with those of a saved position.

        Raises:
            CheckpointError: one of them differs from the one that was saved.
        """
        for place, loader in _by_place(saved).items():
            if place in self._tracks:
                _check_loader(loader, self._tracks[place], changed)

    def go_to(self, saved: Mapping[str, Any], changed: Collection[str]) -> None:
        """Continue where `to_json` was called; loaders that are made later will follow.

        Args:
            saved: what `to_json` wrote, checked by `check_fits`.
            changed: the keys of `PROMISES` that may differ.
        """
        self.step, self.epoch = saved["step"], saved["epoch"]
        self._epoch_used = False
        self._visit += 1
        self._changed = tuple(changed)
        self._waiting = _by_place(saved)
        self._made = {None: self._made[None]}
        for place, track in list(self._tracks.items()):
            if place[0] is not None:
                # Made in an epoch that begins again, where the script makes another in its place.
                track.restart(0)
                del self._tracks[place]
            elif place in self._waiting:
                track.go_to(self._waiting.pop(place), changed)
            else:
                track.restart(self.epoch)


def _is_used(batch: ShardedBatch) -> bool:
    return batch.data_pass is not None and batch.stop <= batch.data_pass.used


def _check_loader(saved: Mapping[str, Any], track: LoaderTrack, changed: Collection[str]) -> None:
    _size_of(saved).check_same(track.size, changed)
    # Before loaders were numbered, all had the order and the random numbers of the first.
    name = "the order and random numbers of loader"
    check_same("dataset", saved.get("loader", 0), track.number, changed, name)


def _size_of(saved: Mapping[str, Any]) -> LoaderSize:
    # Saved loaders carry their passes and places beside the fields of their size.
    known = {field.name for field in fields(LoaderSize)}
    return LoaderSize(**{name: value for name, value in saved.items() if name in known})


def _was_begun(saved: Mapping[str, Any]) -> bool:
    return bool(saved["empty_passes"]) or any(used for _, used in saved["passes"])


def _by_place(saved: Mapping[str, Any]) -> dict[tuple[int | None, int], dict[str, Any]]:
    return {(each["made_in_epoch"], each["number"]): each for each in saved["position"]}
