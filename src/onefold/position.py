"""Where a run is: its step, its epoch, and how far each loader's samples have been used.

Note: what counts as done
-------------------------
A batch counts when its step is done, not when a loader hands it out: what was read ahead is read
again. An epoch counts as done when, since its last step, a pass over a data set has come to its
end; batches that a script cuts itself tell nothing about that, so with them it counts as done once
a step was made in it.

A script that goes on runs again from its beginning, and then from the beginning of the epoch that
it was in. So the passes that it has already gone through there come again, empty; and those of
which no step used anything come again whole. A loader is known again by where it was made: outside
the epochs or in one, and as which there.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping
from dataclasses import asdict, dataclass
from typing import Any

from onefold.batch import DataPass, ShardedBatch
from onefold.errors import CheckpointError

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
        f'it was changed on purpose, trainer.load(..., changed=["{what}"]) goes on; then '
        f"{PROMISES[what]}"
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class LoaderSize:
    """What makes the passes of a loader what they are."""

    samples: int
    """Of the data set."""
    batch_size: int
    drop_last: bool
    shuffle: bool

    def check_same(self, now: LoaderSize, changed: Collection[str]) -> None:
        """Refuse another loader than was saved.

        Raises:
            CheckpointError: it is one.
        """
        samples = "a data set of length"
        check_same("dataset", self.samples, now.samples, changed, samples)
        check_same("batch_size", self.batch_size, now.batch_size, changed, "batch_size")
        check_same("batch_size", self.drop_last, now.drop_last, changed, "drop_last")
        check_same("dataset", self.shuffle, now.shuffle, changed, "shuffle")


class LoaderTrack:
    """Which passes a loader has gone through, and which come next.

    Args:
        size: of the loader.
        first_pass: number of its first pass.
    """

    def __init__(self, size: LoaderSize, first_pass: int) -> None:
        self.size = size
        self._next = first_pass
        self._coming: list[tuple[int, int]] = []
        self._passes: list[DataPass] = []
        self._position: Position | None = None

    def follow(self, position: Position) -> None:
        """Tell ``position`` of passes that end."""
        self._position = position

    def begin(self) -> DataPass:
        """The next pass; ``used`` of its samples are left out."""
        number, used = self._coming.pop(0) if self._coming else (self._next, 0)
        self._next = number + 1
        in_epoch = self._position is not None and self._position.inside
        self._passes.append(DataPass(number, used, in_epoch))
        return self._passes[-1]

    def end(self, this: DataPass) -> None:
        """No more batches of a pass will come."""
        this.over = True
        if self._position is not None and this.used and not this.abandoned:
            self._position.note_pass_end()

    def go_to(self, saved: dict[str, Any]) -> None:
        """Begin with the passes that `to_json` told of; those under way can no longer be used."""
        for each in self._passes:
            each.abandoned = True
        self._passes = []
        self._coming = [(number, min(used, self.size.samples)) for number, used in saved["coming"]]
        self._next = saved["next"]

    def restart(self, first_pass: int) -> None:
        """Begin with a pass of this number; those under way can no longer be used."""
        self.go_to({"coming": [], "next": first_pass})

    def to_json(self, *, epoch_done: bool) -> dict[str, Any]:
        """The passes that a script which goes on goes through next.

        Args:
            epoch_done: the run goes on with the next epoch, not with this one again.
        """
        passes = [p for p in self._passes if not (epoch_done and p.in_epoch and p.over)]
        coming = [[p.number, self.size.samples if p.over and p.used else p.used] for p in passes]
        return {"coming": [*coming, *map(list, self._coming)], "next": self._next}

    def end_epoch(self) -> None:
        """Forget the passes of an epoch that is done."""
        self._passes = [p for p in self._passes if not (p.in_epoch and p.over)]


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
        self._visit = 0
        self._made: dict[int | None, int] = {None: 0}
        self._tracks: dict[tuple[int | None, int], LoaderTrack] = {}
        self._waiting: dict[tuple[int | None, int], dict[str, Any]] = {}
        self._changed: Collection[str] = ()

    def epochs(self, number: int) -> Iterator[int]:
        """Count epochs from where the run is up to ``number``."""
        while self.epoch < number:
            epoch, visit = self.epoch, self._visit
            self.inside, self._epoch_used = True, False
            yield epoch
            self.inside = False
            if visit == self._visit:  # or the run has gone to another place meanwhile
                self._end_epoch()

    def _end_epoch(self) -> None:
        self._made.pop(self.epoch, None)
        self._tracks = {place: t for place, t in self._tracks.items() if place[0] is None}
        for track in self._tracks.values():
            track.end_epoch()
        self.epoch += 1

    def add(self, track: LoaderTrack) -> None:
        """Follow a loader that has just been made, from where it was when the run was saved.

        Raises:
            CheckpointError: it is another one than was saved.
        """
        where = self.epoch if self.inside else None
        place = where, self._made.get(where, 0)
        if place in self._waiting:
            saved = self._waiting[place]
            LoaderSize(**saved["size"]).check_same(track.size, self._changed)
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

    def note_step(self, batch: ShardedBatch) -> None:
        """A batch has been used."""
        self.step += 1
        self._epoch_used = batch.data_pass is None
        if batch.data_pass is not None:
            batch.data_pass.used = batch.stop

    def note_pass_end(self) -> None:
        """A pass of which samples were used has come to its end."""
        self._epoch_used = True

    def to_json(self) -> dict[str, Any]:
        """Where a run goes on that is loaded from here."""
        done = self.inside and self._epoch_used
        told = [{"made_in": w, "number": n, **saved} for (w, n), saved in self._waiting.items()]
        for (where, number), track in self._tracks.items():
            passes = track.to_json(epoch_done=done)
            size = asdict(track.size)
            told.append({"made_in": where, "number": number, "size": size, **passes})
        return {"step": self.step, "epoch": self.epoch + done, "position": told}

    def check_fits(self, saved: Mapping[str, Any], changed: Collection[str]) -> None:
        """Compare the loaders there are with those of a saved position.

        Raises:
            CheckpointError: one of them is another than was saved.
        """
        for place, loader in _by_place(saved).items():
            if place in self._tracks:
                LoaderSize(**loader["size"]).check_same(self._tracks[place].size, changed)

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


def _by_place(saved: Mapping[str, Any]) -> dict[tuple[int | None, int], dict[str, Any]]:
    keys = ("size", "coming", "next")
    return {
        (each["made_in"], each["number"]): {key: each[key] for key in keys}
        for each in saved["position"]
    }
