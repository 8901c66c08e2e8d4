"""Saves a run and goes on with it as the launcher asks, without a line of the script changed."""

from __future__ import annotations

import sys
from pathlib import Path

from onefold.batch import ShardedBatch
from onefold.checkpoint.folder import RUN
from onefold.checkpoint.resume import Checkpoints, Keeping
from onefold.rundir import Progress
from onefold.team import Team

__all__ = ["Autosave"]


class Autosave:
    """Follows the one trainer of a script.

    Args:
        directory: of the checkpoints.
        every: so many steps one is written.
        keep: how many of the newest stay.
        checkpoints: of the trainer.
        progress: tells whether the run is to stop.
    """

    def __init__(
        self,
        directory: Path,
        *,
        every: int,
        keep: int,
        checkpoints: Checkpoints,
        progress: Progress,
    ) -> None:
        self._directory = directory
        self._every = every
        self._keeping = Keeping(keep, None)
        self._checkpoints = checkpoints
        self._progress = progress

    @classmethod
    def of(cls, team: Team, checkpoints: Checkpoints, progress: Progress | None) -> Autosave | None:
        """What the launcher has asked for, if it has; the run is where it was saved last.

        Raises:
            ValueError: the script makes a second trainer.
            CheckpointError: what was saved does not fit, or cannot be used.
        """
        world = team.world
        if not world.checkpoint or progress is None:
            return None
        if team.trainer > 0:
            raise ValueError(
                "onefold run --checkpoint follows one Trainer, and this script makes a second one: "
                "call trainer.save and trainer.load in the script instead"
            )
        directory = Path(world.checkpoint)
        if (directory / RUN).exists():
            raise ValueError(
                f"--checkpoint {directory} is the folder of one checkpoint: expected the directory "
                f"that holds it, {directory.parent}"
            )
        found = checkpoints.load(directory, if_any=True)
        if found is not None and 0 in team.own:
            print(f"onefold: going on after step {found.step}: {found.folder}", file=sys.stderr)
        return cls(
            directory,
            every=world.checkpoint_every,
            keep=world.checkpoint_keep,
            checkpoints=checkpoints,
            progress=progress,
        )

    @property
    def asked_to_stop(self) -> bool:
        """Whether this process has been."""
        return self._progress.stop_requested()

    def check(self, batch: ShardedBatch) -> None:
        """Refuse a batch that the script has cut itself: where to go on could not be known.

        Raises:
            ValueError: it is one.
        """
        if batch.data_pass is None:
            raise ValueError(
                "onefold run --checkpoint goes on at the very sample where a run stopped, and does "
                "not know it for batches of your own: use trainer.loader, or call trainer.save and "
                "trainer.load in the script and leave out what trainer.steps says is done"
            )

    def after_step(self, step: int, *, stop: bool) -> None:
        """Save if it is time, or as the run is about to stop: then all is on the disk after."""
        if stop or step % self._every == 0:
            self._checkpoints.save(
                self._directory, scores={}, keeping=self._keeping, wait=stop, extra=None
            )
