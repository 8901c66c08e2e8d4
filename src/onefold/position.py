"""Where a run is: its step, its epoch, and how far each loader's samples have been used.

Note: what counts as done
-------------------------
A batch counts when its step is done, not when a loader hands it out: what was read ahead is read
again. An epoch counts as done when, since its last step, a pass over a data set has come to its
end; batches that a script cuts itself tell nothing about that, so with them it counts as done once
a step was made in it.

A loader is known again by where it was made: outside the epochs or in one, and as which there.
"""

from __future__ import annotations

import weakref
from collections.abc import Collection, Iterator, Mapping
from dataclasses import asdict, dataclass
from typing import Any, Protocol

from onefold.batch import ShardedBatch
from onefold.errors import CheckpointError

__all__ = ["PROMISES", "LoaderPosition", "Position", "check_same"]

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
class LoaderPosition:
    """A loader, and how far its samples have been used."""

    epoch: int | None
    """In which epoch it was made; None for outside."""
    number: int
    """Which of the loaders made there."""
    samples: int
    """Of the data set."""
    batch_size: int
    drop_last: bool
    shuffle: bool
    next_pass: int
    """The pass that it is in, or that comes next."""
    used: int
    """Samples of that pass whose steps are done."""


class Positioned(Protocol):
    """A loader, as far as its position goes."""

    def position(self) -> tuple[int, int]:
        """The pass that it is in or that comes next, and how many of its samples are used."""

    def go_to(self, next_pass: int, used: int) -> None:
        """Go on there; a pass that is under way can no longer be used."""

    def size(self) -> tuple[int, int, bool, bool]:
        """Samples of the data set, batch size, whether a short last batch is dropped, shuffle."""


@dataclass(slots=True)
class _Known:
    loader: weakref.ref[Positioned]
    epoch: int | None
    number: int


class Position:
    """Where a trainer is; goes through the epochs, and follows the loaders."""

    def __init__(self) -> None:
        self.step = 0
        """Steps done."""
        self.epoch = 0
        """The epoch that the run is in, or the next one."""
        self._inside = False
        self._epoch_used = False
        self._visit = 0
        self._made: dict[int | None, int] = {None: 0}
        self._loaders: list[_Known] = []
        self._waiting: dict[tuple[int | None, int], LoaderPosition] = {}
        self._changed: Collection[str] = ()

    def epochs(self, number: int) -> Iterator[int]:
        """Count epochs from where the run is up to ``number``."""
        while self.epoch < number:
            epoch, visit = self.epoch, self._visit
            self._inside, self._epoch_used = True, False
            self._made = {None: self._made[None]}
            yield epoch
            self._inside = False
            if visit == self._visit:  # or the run has gone to another place meanwhile
                self.epoch = epoch + 1

    def add(self, loader: Positioned) -> None:
        """Follow a loader that has just been made, from where it was when the run was saved.

        Raises:
            CheckpointError: it is another one than was saved.
        """
        where = self.epoch if self._inside else None
        number = self._made.get(where, 0)
        waiting = self._waiting.get((where, number))
        if waiting is not None:
            _place(loader, waiting, self._changed)
            del self._waiting[where, number]
        self._made[where] = number + 1
        self._loaders = [known for known in self._loaders if known.loader() is not None]
        self._loaders.append(_Known(weakref.ref(loader), where, number))

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
        following = dict(self._waiting)
        for known in self._loaders:
            loader = known.loader()
            if loader is not None:
                samples, batch_size, drop_last, shuffle = loader.size()
                next_pass, used = loader.position()
                following[known.epoch, known.number] = LoaderPosition(
                    epoch=known.epoch,
                    number=known.number,
                    samples=samples,
                    batch_size=batch_size,
                    drop_last=drop_last,
                    shuffle=shuffle,
                    next_pass=next_pass,
                    used=used,
                )
        return {
            "step": self.step,
            "epoch": self.epoch + (self._inside and self._epoch_used),
            "position": [asdict(position) for position in following.values()],
        }

    def check_fits(self, saved: Mapping[str, Any], changed: Collection[str]) -> None:
        """Compare the loaders there are with those of a saved position.

        Raises:
            CheckpointError: one of them is another than was saved.
        """
        positions = _by_place(saved)
        for known in self._loaders:
            loader, position = known.loader(), positions.get((known.epoch, known.number))
            if loader is not None and position is not None:
                _check_loader(loader, position, changed)

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
        for known in self._loaders:
            loader = known.loader()
            position = self._waiting.pop((known.epoch, known.number), None)
            if loader is None:
                continue
            if position is not None:
                _place(loader, position, changed)
            else:
                loader.go_to(self.epoch, 0)


def _by_place(saved: Mapping[str, Any]) -> dict[tuple[int | None, int], LoaderPosition]:
    positions = [LoaderPosition(**each) for each in saved["position"]]
    return {(each.epoch, each.number): each for each in positions}


def _place(loader: Positioned, position: LoaderPosition, changed: Collection[str]) -> None:
    _check_loader(loader, position, changed)
    samples, *_ = loader.size()
    loader.go_to(position.next_pass, min(position.used, samples))


def _check_loader(loader: Positioned, position: LoaderPosition, changed: Collection[str]) -> None:
    samples, batch_size, drop_last, shuffle = loader.size()
    check_same("dataset", position.samples, samples, changed, "a data set of length")
    check_same("batch_size", position.batch_size, batch_size, changed, "batch_size")
    check_same("batch_size", position.drop_last, drop_last, changed, "drop_last")
    check_same("dataset", position.shuffle, shuffle, changed, "shuffle")
