"""Saves a run every so many steps or seconds and at its end, and stops it on request."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from onefold.checkpoint.folder import Keeping
from onefold.checkpoint.manifest import Place
from onefold.core.assignment import Devices
from onefold.core.batch import DataPass, ShardedBatch
from onefold.exchange.progress import Progress
from onefold.launcher.membership import RunStopped, at_good_end, only_noting
from onefold.session.run import RunSetup, RunView
from onefold.step.hook import Hook, Make, ScriptCall, Spans, Surrounds
from onefold.step.result import Step
from onefold.system.process import STOPPED_CODE

__all__ = ["Autosaving", "prepare"]

_log = logging.getLogger("onefold")


def prepare(start: RunSetup) -> Callable[[RunView], Hook]:
    """Save a run as its options ask."""
    return Autosaving


class SaveClock:
    """Makes a checkpoint due by time, after the same step on all devices.

    The lead's clock decides, before a step begins. It asks for one step at a time: for the next one
    when that is saved, which all devices do together, and so when all have seen it.

    Args:
        progress: the table in which the lead asks for it.
        every_s: how many seconds apart checkpoints are written; 0 for never.
        devices: who takes part; the lead decides.
    """

    def __init__(self, progress: Progress, every_s: float, devices: Devices) -> None:
        self._progress, self._every_s, self._devices = progress, every_s, devices
        self.restart()

    def restart(self) -> None:
        """Begin anew, as a checkpoint was written."""
        self._began, self._asked = time.monotonic(), False

    def begin_step(self, step: int) -> None:
        """Ask for a checkpoint after ``step``, which is about to begin, if it is time for one."""
        late = self._every_s and time.monotonic() - self._began >= self._every_s
        if late and not self._asked and self._devices.has_lead:
            self._progress.save_after(step)
            self._asked = True

    def is_due(self, step: int) -> bool:
        """Whether a checkpoint was asked for after ``step``, which is done."""
        return self._progress.saves_after(step)


_MOST_PUT_OFF = 100
"""The most steps for which a checkpoint is put off: an iterator that the script keeps and never
goes on with would put it off for ever."""
_REPORTED_PUT_OFF = 10
"""The steps after which that is reported: more than a script has loaders side by side."""


class Autosaving(Hook):
    """Saves the one Trainer of a script.

    A checkpoint that is due after a step is written when the next one begins, so that it has all
    that the script has done by then: at the end of an epoch, at the beginning of the next one, to
    its scheduler, in an update of its own. A resumed run continues at that very place, see
    `onefold.tools.answers`. One that falls between two steps of one batch, or between the steps of
    batches that several loaders have read side by side, waits for the last of these.

    Args:
        run: the run.
    """

    saves_run = True

    def __init__(self, run: RunView) -> None:
        assert run.progress is not None
        assert run.lock is not None
        options = run.context.options
        self._run, self._position, self._scheduler = run, run.position, run.scheduler
        self._directory, self._lock = Path(options.checkpoint), run.lock
        self._every, self._keeping = options.save_every, Keeping(options.keep_last)
        self._clock = SaveClock(run.progress, options.save_every_s, run.devices)
        self._saved = run.begun_after
        self._at_next = False
        """Whether the checkpoint that is due is to be written as the next step begins."""
        self._reuses = False
        """Whether the script uses batches for several steps."""
        self._blocks_before: int | None = None
        """How many blocks of changes the script had opened before its first step."""
        self._put_off = 0
        """For how many steps what is due has been put off; 0 if nothing is."""
        self._taken: dict[int, tuple[DataPass, int]] = {}
        """Passes of batches that the script took whole since its last step, and where they end."""
        self._is_savable = False
        """Whether the state of the optimizer can be saved, as its first update has shown."""
        self._stop = False
        at_good_end(self.finish)

    @property
    def _blocks(self) -> int:
        """How many blocks of changes the script has opened."""
        return self._run.changes().blocks

    def call(self, asked: ScriptCall, make: Make) -> Any:
        """Note batches that the script takes whole: its next step uses what it makes of them."""
        if asked.kind == "payloads" and asked.given.data_pass is not None:
            taken = asked.given.data_pass
            self._taken[id(taken)] = taken, asked.given.stop
        return make()

    def around(self, asked: ScriptCall) -> Surrounds:
        """Save what is due before a step.

        Raises:
            RunStopped: the run was asked to stop, and is saved.
        """
        if asked.cut is not None and asked.begins:
            self._check(asked.cut, gradient=asked.kind == "gradient")
            if self._before_step(asked.cut):
                raise RunStopped(STOPPED_CODE)
        return None

    def after_step(self, asked: ScriptCall, step: Step, spans: Spans) -> None:
        """Note that a step is done, but for the script's own update, if it makes one."""
        for taken, stop_of_batch in self._taken.values():
            taken.used = max(stop_of_batch, taken.used)
        self._taken.clear()
        if asked.cut is not None and asked.computed:
            if not self._is_savable:
                # As soon as there is state, and not in hours, at the first checkpoint.
                with self._run.telling_others():
                    self._run.checkpoints.check_savable()
                self._is_savable = True
            stop, updated = step.outcome.verdict.stops, asked.kind == "step"
            with self._run.telling_others():
                self._after_step(asked.cut, stop=stop, updated=updated)

    def finish(self) -> None:
        """Save the end of the run, unless it is saved, and let another one save itself there."""
        if not self._run.left():
            with self._run.telling_others(), only_noting():
                if self._position.step > self._saved or self._run.checkpoints.lost:
                    self._stop = True
                    self._save("end")
        with self._run.telling_others():
            self._run.checkpoints.finish()
        self.close()

    def close(self) -> None:
        """Let another run save itself there, whatever has become of this one."""
        self._lock.let_go()

    def _check(self, batch: ShardedBatch, *, gradient: bool) -> None:
        """Refuse a step that could not be resumed as if nothing had happened.

        Args:
            batch: the batch of the step.
            gradient: whether the update is the script's own.

        Raises:
            ValueError: the script cuts its batches itself, or steps a scheduler that no checkpoint
                would hold.
        """
        if batch.data_pass is None and gradient:
            raise ValueError(
                "onefold run --checkpoint goes on at the very sample where a run stopped, and does "
                "not know it for batches of your own with trainer.gradient, whose updates no "
                "record has: use trainer.loader or trainer.batches, or call trainer.save and "
                "trainer.load in the script and leave out what trainer.steps says is done"
            )
        if self._position.repeats_part(batch):
            raise ValueError(
                "one of the batches in this step was used in a step before and another was not, as "
                "with itertools.cycle, which keeps the batches of the first pass: onefold run "
                "--checkpoint could not go on with it. Read the loader again and again, by "
                "itertools.chain.from_iterable(itertools.repeat(loader))"
            )
        self._reuses |= self._position.has_used(batch)
        if self._blocks_before is None:
            self._blocks_before = self._blocks
        if self._scheduler.is_missing:
            raise ValueError(
                "a learning rate scheduler is attached to the optimizer that onefold run "
                "--checkpoint does not save, as Trainer was not given it: make Trainer with "
                'scheduler=scheduler and scheduler_every="script", and leave the lines that step '
                'it as they are; or with scheduler_every="epoch" or "step", and without those lines'
            )

    def _before_step(self, batch: ShardedBatch) -> bool:
        """Save what is due; return whether to stop now.

        Raises:
            ValueError: the batch is used on and on, and no checkpoint can be made meanwhile.
        """
        is_used = self._position.has_used(batch)
        too_long = self._put_off > _MOST_PUT_OFF
        if self._at_next and is_used and too_long:
            raise ValueError(
                f"this batch is used for more than {_MOST_PUT_OFF} steps, and onefold run "
                f"--checkpoint saves between batches: use each of a run for at most "
                f"{_MOST_PUT_OFF}, or call trainer.save and trainer.load in the script, after "
                f"the last step of a batch"
            )
        waits = is_used or (self._position.is_at_an_end() and not too_long)
        saves = self._at_next and not waits
        if saves:
            self._save("step")
        self._clock.begin_step(self._position.step + 1)
        return saves and self._stop

    def _after_step(self, batch: ShardedBatch, *, stop: bool, updated: bool) -> None:
        """Note whether a checkpoint is due, as of every so many steps, or as the run is to stop.

        Args:
            batch: the batch of the step.
            stop: whether the run was asked to stop.
            updated: whether the step is done; an update of the script's is still to come.
        """
        self._stop |= stop
        step = self._position.step
        due = stop or (self._every > 0 and step % self._every == 0) or self._clock.is_due(step)
        self._at_next = False
        if not due and not self._put_off:
            return
        # All devices come to the same answer here, as it follows from agreed values alone.
        self._put_off += 1
        between = self._position.is_between_batches(batch)
        self._at_next = between or self._put_off > _MOST_PUT_OFF
        if not between and self._put_off == _REPORTED_PUT_OFF and self._run.devices.has_lead:
            _log.warning(
                "the checkpoint that was due after step %d is put off, for %d steps at most: a "
                "loader has handed out a batch that no step has used, and the checkpoint is to be "
                "made between batches. Give batches to trainer.step, or take them by "
                "batch.whole(), and drop iterators that are no longer read",
                *(step - _REPORTED_PUT_OFF + 1, _MOST_PUT_OFF),
            )
        # A request to stop at the end of an epoch: the script's work there may take longer than the
        # grace period, so save first as well, unless the script may change the saved state between
        # two steps.
        plain = updated and not self._reuses and not self._scheduler.is_the_scripts
        plain = plain and self._blocks == self._blocks_before
        if self._stop and plain and between and self._position.is_at_an_end():
            self._write(None)

    def _save(self, place: Place) -> None:
        self._write(place)
        self._clock.restart()
        self._at_next = False
        self._put_off = 0
        self._saved = self._position.step

    def _write(self, place: Place) -> None:
        self._run.checkpoints.save(
            self._directory, keeping=self._keeping, wait=self._stop, place=place
        )
