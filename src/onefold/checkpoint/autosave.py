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
from onefold.system.folderlock import FolderLock, lock_of_checkpoints

__all__ = ["Autosave"]


_MOST_PUT_OFF = 100
"""The most steps for which a checkpoint is put off: an iterator that the script keeps and never
goes on with would put it off for ever."""


class Autosave:
    """Saves the one trainer of a script every so many steps, and at the end.

    A checkpoint that falls on the last batch of a pass is put off until the next step begins, so
    that what the script does at the end of an epoch is done by then. So is every one where the
    script steps the schedule, which it does between two steps, where it uses batches for more than
    one step, which the second batch shows, and after a gradient without an update, which the script
    has made by the time of the next step. One that falls between the steps of batches that several
    loaders have read side by side is put off to the last of these.

    Args:
        directory: where the checkpoints lie.
        every: how many steps apart they are written.
        keep: how many of the newest stay.
        checkpoints: saves and loads the trainer.
        position: where the trainer is.
        lock: of the directory; the lead's process holds it.
    """

    def __init__(
        self,
        directory: Path,
        *,
        every: int,
        keep: int,
        checkpoints: Checkpoints,
        position: Position,
        lock: FolderLock,
    ) -> None:
        self._directory = directory
        self._lock = lock
        self._every = every
        self._keeping = Keeping(keep)
        self._checkpoints = checkpoints
        self._schedule = checkpoints.schedule
        self._position = position
        self._saved = position.step
        self._due = False
        self._at_next = False
        """Whether the checkpoint that is due was put off to the beginning of the next step."""
        self._reuses: bool | None = None
        """Whether the script uses batches for several steps; None until that is known."""
        self._stepped = False
        """Whether a step was made since the start."""
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
            LaunchError: another run saves itself there.
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
        lock = lock_of_checkpoints(directory)
        if team.has_lead:
            lock.take(world.options.grace_s)
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
            keep=world.options.keep_last,
            checkpoints=checkpoints,
            position=position,
            lock=lock,
        )

    def check(self, batch: ShardedBatch) -> None:
        """Refuse a step that could not be resumed as if nothing had happened.

        Raises:
            ValueError: the script cuts its batches itself, goes on with one that is saved as done,
                or steps a schedule that no checkpoint would hold, or at the beginning of an epoch.
        """
        if batch.data_pass is None:
            raise ValueError(
                "onefold run --checkpoint goes on at the very sample where a run stopped, and does "
                "not know it for batches of your own: use trainer.loader or trainer.batches, or "
                "call trainer.save and trainer.load in the script and leave out what trainer.steps "
                "says is done"
            )
        if self._position.repeats_part(batch):
            raise ValueError(
                "one of the batches in this step was used in a step before and another was not, as "
                "with itertools.cycle, which keeps the batches of the first pass: onefold run "
                "--checkpoint could not go on with it. Read the loader again and again, by "
                "itertools.chain.from_iterable(itertools.repeat(loader))"
            )
        if self._position.has_used(batch):
            self._reuses = True
            if self._saved == self._position.step:
                raise ValueError(
                    "this batch is used for one more step, and the checkpoint before it, which "
                    "onefold run --checkpoint has just written, counts it as done: use every batch "
                    "of a run for the same number of steps, at most 100, or call trainer.save and "
                    "trainer.load in the script, after the last step of a batch"
                )
        elif self._reuses is None and self._stepped:
            self._reuses = False
        self._schedule.check_resumable()
        if self._schedule.is_missing:
            raise ValueError(
                "a learning-rate schedule is attached to the optimizer that onefold run "
                "--checkpoint does not save, as Trainer was not given it: make Trainer with "
                'schedule=schedule and schedule_every="script", and leave the lines that step it '
                'as they are; or with schedule_every="epoch" or "step", and without those lines'
            )

    def before_step(self, batch: ShardedBatch) -> bool:
        """Save what was put off to the next step; return whether to stop now."""
        if not self._at_next or self._position.has_used(batch):
            return False
        if self._position.is_at_an_end() and self._put_off <= _MOST_PUT_OFF:
            return False
        self._save()
        return self._stop

    def after_step(self, batch: ShardedBatch, *, stop: bool) -> bool:
        """Save if a checkpoint is due or the run is to stop; return whether to stop now."""
        self._stepped = True
        self._stop |= stop
        self._due |= stop or self._position.step % self._every == 0
        self._at_next = False
        if not self._due:
            return False
        # All devices come to the same answer here, as it follows from agreed values alone.
        self._put_off += 1
        late = self._schedule.is_the_scripts or self._reuses is not False
        at_end = self._position.is_at_an_end()
        if self._put_off > _MOST_PUT_OFF:
            self._at_next = self._schedule.is_the_scripts
        elif not self._position.is_between_batches(batch):
            return False
        else:
            self._at_next = late or at_end
        if not self._at_next:
            self._save()
            return self._stop
        # Asked to stop at the end of an epoch: what the script does there may take longer than the
        # grace, so save once before it, and again after it if there is time.
        if self._stop and at_end and not late:
            self._write()
        return False

    def after_gradient(self, batch: ShardedBatch, *, stop: bool) -> None:
        """Note that a step has its gradient; its update is the script's, and still to come.

        What is due is saved before the next step, when the script has made its update.
        """
        self._stop |= stop
        self._due |= stop or self._position.step % self._every == 0
        self._at_next = False
        if self._due:
            self._put_off += 1
            late = self._put_off > _MOST_PUT_OFF
            self._at_next = late or self._position.is_between_batches(batch)

    def finish(self) -> None:
        """Save the end of the run, unless it is saved already."""
        if self._position.step > self._saved or self._checkpoints.lost:
            self._stop = True
            self._save()

    def leave(self) -> None:
        """Let another run save itself in the directory, once everything is written."""
        self._lock.let_go()

    def _save(self) -> None:
        self._write()
        self._due = self._at_next = False
        self._put_off = 0
        self._saved = self._position.step

    def _write(self) -> None:
        self._lock.keep()
        self._checkpoints.save(self._directory, keeping=self._keeping, wait=self._stop)
