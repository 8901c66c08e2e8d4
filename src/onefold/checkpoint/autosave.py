"""Saves and resumes a run as the launcher asks, without a line of the script changed."""

from __future__ import annotations

import sys
from pathlib import Path

from onefold.checkpoint.keeping import Keeping
from onefold.checkpoint.record import RUN
from onefold.checkpoint.resume import Checkpoints
from onefold.core.batch import ShardedBatch
from onefold.core.team import Team
from onefold.exchange.progress import Progress
from onefold.reading.position import Position

__all__ = ["Autosave"]


_MOST_PUT_OFF = 100
"""The most steps for which a checkpoint is put off: an iterator that the script keeps and never
goes on with would put it off for ever."""


class Autosave:
    """Saves the one trainer of a script every so many steps, and at the end.

    A checkpoint that falls on the last batch of a pass is put off until the next step begins, so
    that what the script does at the end of an epoch is done by then. So is one that falls between
    the steps of batches that several loaders have read side by side.

    Args:
        directory: where the checkpoints lie.
        every: how many steps apart they are written.
        keep: how many of the newest stay.
        checkpoints: saves and loads the trainer.
        position: where the trainer is.
    """

    def __init__(
        self,
        directory: Path,
        *,
        every: int,
        keep: int,
        checkpoints: Checkpoints,
        position: Position,
    ) -> None:
        self._directory = directory
        self._every = every
        self._keeping = Keeping(keep)
        self._checkpoints = checkpoints
        self._position = position
        self._saved = position.step
        self._due = False
        self._at_end = False
        """Whether the checkpoint that is due was put off to the end of a pass."""
        self._put_off = 0
        """For how many steps what is due has been put off."""
        self._stop = False

    @classmethod
    def of(
        cls,
        team: Team,
        checkpoints: Checkpoints,
        position: Position,
        progress: Progress | None,
    ) -> Autosave | None:
        """Resume the run from its last checkpoint, and save it from here on, if that was asked for.

        Returns:
            None if the launcher has not asked for checkpoints.

        Raises:
            ValueError: the script makes a second trainer, or the directory is itself a checkpoint.
            CheckpointError: what was saved does not fit this run, or cannot be used.
            OSError: no checkpoint could be written there.
        """
        world = team.world
        if not world.options.checkpoint or progress is None:
            return None
        if team.trainer > 0:
            raise ValueError(
                "onefold run --checkpoint follows one Trainer, and this script makes a second one: "
                "call trainer.save and trainer.load in the script instead"
            )
        directory = Path(world.options.checkpoint)
        if (directory / RUN).exists():
            raise ValueError(
                f"--checkpoint {directory} is the folder of one checkpoint: expected the directory "
                f"that holds it, {directory.parent}"
            )
        # Now, as a full or read-only disk is better found before the first hours of training.
        checkpoints.try_directory(directory)
        found = checkpoints.load(
            directory,
            changed=world.options.changed,
            if_any=True,
            leave_out=world.leave_out,
        )
        if found is not None and team.has_lead:
            print(f"onefold: going on after step {found.step}: {found.folder}", file=sys.stderr)
        return cls(
            directory,
            every=world.options.every,
            keep=world.options.keep,
            checkpoints=checkpoints,
            position=position,
        )

    def check(self, batch: ShardedBatch) -> None:
        """Refuse a step that could not be resumed as if nothing had happened.

        Raises:
            ValueError: the script cuts its batches itself, uses one twice, or steps a schedule.
        """
        if batch.data_pass is None:
            raise ValueError(
                "onefold run --checkpoint goes on at the very sample where a run stopped, and does "
                "not know it for batches of your own: use trainer.loader or trainer.batches, or "
                "call trainer.save and trainer.load in the script and leave out what trainer.steps "
                "says is done"
            )
        if self._position.has_used(batch):
            raise ValueError(
                "onefold run --checkpoint counts a batch as done with its first step, and this one "
                "is used for a second one: call trainer.save and trainer.load in the script, after "
                "the last step of a batch"
            )
        if self._checkpoints.misses_a_schedule():
            raise ValueError(
                "a learning-rate schedule is attached to the optimizer that onefold run "
                "--checkpoint does not save, as the script steps it itself: give it to Trainer as "
                "schedule=, which steps it once a step, or call trainer.save and trainer.load in "
                "the script"
            )

    def before_step(self) -> bool:
        """Save what was put off to the end of a pass; return whether to stop now."""
        if not self._at_end or self._position.is_at_an_end():
            return False
        self._save()
        return self._stop

    def after_step(self, batch: ShardedBatch, *, stop: bool) -> bool:
        """Save if a checkpoint is due or the run is to stop; return whether to stop now."""
        self._stop |= stop
        self._due |= stop or self._position.step % self._every == 0
        self._at_end = False
        if not self._due:
            return False
        # All devices come to the same answer here, as it follows from agreed values alone.
        self._put_off += 1
        if self._put_off <= _MOST_PUT_OFF:
            if not self._position.is_between_batches(batch):
                return False
            self._at_end = self._position.is_at_an_end()
        if not self._at_end:
            self._save()
            return self._stop
        # Asked to stop at the end of an epoch: what the script does there may take longer than the
        # grace, so save once before it, and again after it if there is time.
        if self._stop:
            self._write()
        return False

    def finish(self) -> None:
        """Save the end of the run, unless it is saved already."""
        if self._position.step > self._saved or self._checkpoints.lost:
            self._stop = True
            self._save()

    def _save(self) -> None:
        self._write()
        self._due = self._at_end = False
        self._put_off = 0
        self._saved = self._position.step

    def _write(self) -> None:
        self._checkpoints.save(self._directory, keeping=self._keeping, wait=self._stop)
