"""Saves a run at intervals of steps or seconds and at its end, and stops it on request."""

from __future__ import annotations

import atexit
import logging
import os
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from onefold.checkpoint.folder import Keeping
from onefold.checkpoint.manifest import Place
from onefold.core.batch import DataPass, ShardedBatch
from onefold.core.call_digest import StepRequests
from onefold.launcher import membership
from onefold.launcher.membership import RunStopped, at_good_end, only_noting
from onefold.session.run import RunSetup, RunView
from onefold.step.hook import Hook, Make, ScriptCall, Spans, Surrounds
from onefold.step.result import Step
from onefold.system.process import STOPPED_CODE
from onefold.system.words import tell

__all__ = ["Autosaving", "prepare"]

_log = logging.getLogger("onefold")


def prepare(start: RunSetup) -> Callable[[RunView], Hook]:
    """Save the run as its options request."""

    def begin(run: RunView) -> Hook:
        hook = Autosaving(run)
        # A worker of onefold and a simulated device call `end_well` at the end of their script.
        if run.context.launcher != "onefold" and run.context.network is None:
            # Registered after the Trainer joined its run, so that it runs before `leave`. When
            # `atexit` calls functions, Python starts no thread and no pool accepts work any more,
            # so the main thread does this earlier. Another thread may continue training.
            is_main = threading.current_thread() is threading.main_thread()
            register = threading._register_atexit if is_main else atexit.register  # type: ignore[attr-defined]
            register(_end_by_itself, membership.members)
        return hook

    return begin


def _end_by_itself(members: membership.Members) -> None:
    """Save the end of a run that no launcher of onefold watches, unless its script failed.

    An exit code that the script passes to ``sys.exit`` is not known here.
    """
    if members is not membership.members or hasattr(sys, "last_type"):
        return
    try:
        membership.end_well()
    except BaseException as error:
        # Python exits with code 0 if a function of `atexit` raises.
        sys.excepthook(type(error), error, error.__traceback__)
        membership.leave(error)
        atexit.unregister(_end_by_itself)
        atexit._run_exitfuncs()
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(1)


_MOST_PUT_OFF = 100
"""Maximum number of steps by which a checkpoint is delayed. An iterator that the script keeps but
never reads again would otherwise delay it forever."""
_REPORTED_PUT_OFF = 10
"""Number of steps after which a delay is reported: more than a script interleaves loaders."""


class Autosaving(Hook):
    """Saves the only Trainer of a script.

    A checkpoint that is due after a step is written at the start of the next step, so that it
    includes everything that the script does in between: at the end of an epoch and the start of the
    next, to its scheduler, or in its own update. A resumed run continues at exactly this position,
    see `onefold.tools.answers`. A checkpoint that is due between two steps of the same batch, or
    between the steps of interleaved loaders, is delayed until the last of these steps.

    Args:
        run: the run.
    """

    saves_run = True

    def __init__(self, run: RunView) -> None:
        assert run.lock is not None
        options = run.context.options
        self._run, self._position, self._scheduler = run, run.position, run.scheduler
        self._directory, self._lock = Path(options.checkpoint), run.lock
        self._shown = options.remote or options.checkpoint
        self._every, self._keeping = options.save_every, Keeping(options.keep_last)
        self._every_s, self._began_s = options.save_every_s, time.monotonic()
        self._saved = run.begun_after
        self._at_next = False
        """Whether the due checkpoint is to be written at the start of the next step."""
        self._reuses = False
        """Whether the script uses a batch for several steps."""
        self._blocks_before: int | None = None
        """Number of `modifying` blocks that the script opened before its first step."""
        self._put_off = 0
        """Number of steps by which a due checkpoint is delayed; 0 if none is due."""
        self._taken: dict[int, tuple[DataPass, int]] = {}
        """Passes of the whole batches taken since the last step, with the batches' ends."""
        self._is_savable = False
        """Whether the optimizer state is known to be savable, which its first update shows."""
        self._stop = False
        run.engine.external.resumes = True
        at_good_end(self.finish)

    @property
    def _blocks(self) -> int:
        """Number of `modifying` blocks that the script has opened."""
        return self._run.changes().blocks

    def call(self, asked: ScriptCall, make: Make) -> Any:
        """Note whole batches that the script takes: its next step uses data made from them."""
        if asked.kind == "payloads" and asked.given.data_pass is not None:
            taken = asked.given.data_pass
            self._taken[id(taken)] = taken, asked.given.stop
        return make()

    def around(self, asked: ScriptCall) -> Surrounds:
        """Write a due checkpoint before a step.

        Raises:
            RunStopped: a stop was requested, and the run is saved.
        """
        if asked.cut is not None and asked.begins:
            self._check(asked.cut, gradient=asked.kind == "gradient")
            if self._before_step(asked.cut):
                self._tell_stopped()
                raise RunStopped(STOPPED_CODE)
            # The lead's clock decides, and all devices agree on it with the step.
            late = self._every_s and time.monotonic() - self._began_s >= self._every_s
            if late and self._run.devices.has_lead:
                asked.requests |= StepRequests.SAVE
        return None

    def _tell_stopped(self) -> None:
        # The launcher of onefold reports this itself, with the name of the signal.
        if self._run.devices.has_lead and self._run.context.launcher != "onefold":
            tell(
                f"asked to stop: saved after step {self._position.step} in {self._shown}. "
                f"Start the same command again to continue"
            )

    def after_step(self, asked: ScriptCall, step: Step, spans: Spans) -> None:
        """Note a finished step, and check whether to save. A script's own update follows."""
        for taken, stop_of_batch in self._taken.values():
            taken.used = max(stop_of_batch, taken.used)
        self._taken.clear()
        if asked.cut is not None and asked.computed:
            if not self._is_savable:
                # Check as soon as there is state, not hours later at the first checkpoint.
                with self._run.telling_others():
                    self._run.checkpoints.check_savable()
                self._is_savable = True
            with self._run.telling_others():
                requests = step.outcome.verdict.requests
                self._after_step(asked.cut, requests, updated=asked.kind == "step")

    def finish(self) -> None:
        """Save the end of the run unless it is saved, and release the directory."""
        if not self._run.left():
            with self._run.telling_others(), only_noting():
                if self._position.step > self._saved or self._run.checkpoints.lost:
                    self._stop = True
                    self._save("end")
        with self._run.telling_others():
            self._run.checkpoints.finish()
        self.close()

    def close(self) -> None:
        """Release the directory for other runs."""
        self._lock.let_go()

    def _check(self, batch: ShardedBatch, *, gradient: bool) -> None:
        """Raise if the run could not be resumed exactly after this step.

        Args:
            batch: batch of the step.
            gradient: whether the script makes the update.

        Raises:
            ValueError: the script makes its batches itself, or steps a scheduler that no checkpoint
                would contain.
        """
        if batch.data_pass is None and gradient:
            raise ValueError(
                "onefold run --checkpoint cannot resume batches that the script makes itself for "
                "trainer.gradient, because the record does not contain their updates. Use "
                "trainer.loader or trainer.batches, or call trainer.save and trainer.load and skip "
                "the first trainer.steps steps"
            )
        if self._position.repeats_part(batch):
            raise ValueError(
                "a step uses one batch that was used before and one that was not, as with "
                "itertools.cycle, which keeps the batches of the first pass: onefold run "
                "--checkpoint could not resume it. Read the loader repeatedly, with "
                "itertools.chain.from_iterable(itertools.repeat(loader))"
            )
        self._reuses |= self._position.has_used(batch)
        if self._blocks_before is None:
            self._blocks_before = self._blocks
        if self._scheduler.is_missing:
            raise ValueError(
                "onefold run --checkpoint cannot save the optimizer's learning rate scheduler "
                "because it was not passed to Trainer. Pass "
                'scheduler=scheduler with scheduler_every="script" and keep your scheduler.step() '
                "calls, "
                'or pass "epoch" or "step" and remove them'
            )

    def _before_step(self, batch: ShardedBatch) -> bool:
        """Write a due checkpoint; return whether to stop now.

        Raises:
            ValueError: the script keeps using a batch, so that no checkpoint can be made.
        """
        is_used = self._position.has_used(batch)
        too_long = self._put_off > _MOST_PUT_OFF
        if self._at_next and is_used and too_long:
            raise ValueError(
                f"this batch is used for more than {_MOST_PUT_OFF} steps, but onefold run "
                f"--checkpoint saves only between batches. Use a batch for at most {_MOST_PUT_OFF} "
                f"consecutive steps, or call trainer.save and trainer.load in the script, after "
                f"the last step of a batch"
            )
        waits = is_used or (self._position.is_at_an_end() and not too_long)
        saves = self._at_next and not waits
        if saves:
            self._save("step")
        return saves and self._stop

    def _after_step(self, batch: ShardedBatch, requests: StepRequests, *, updated: bool) -> None:
        """Decide whether a checkpoint is due, by the interval or because of a stop request.

        Args:
            batch: batch of the step.
            requests: requests of any device.
            updated: whether the step is complete; otherwise the script's own update is still to
                come.
        """
        self._stop |= StepRequests.STOP in requests
        due = bool(requests) or (self._every > 0 and self._position.step % self._every == 0)
        self._at_next = False
        if not due and not self._put_off:
            return
        # All devices decide the same, because the decision depends only on agreed values.
        self._put_off += 1
        between = self._position.is_between_batches(batch)
        self._at_next = between or self._put_off > _MOST_PUT_OFF
        if not between and self._put_off == _REPORTED_PUT_OFF and self._run.devices.has_lead:
            _log.warning(
                "the checkpoint that was due after step %d is delayed, by up to %d steps: a loader "
                "has yielded a batch that no step has used, and checkpoints are made between "
                "batches. Pass batches to trainer.step, or read them with batch.whole(), and drop "
                "iterators that are no longer read",
                *(self._position.step - _REPORTED_PUT_OFF + 1, _MOST_PUT_OFF),
            )
        # A stop request at the end of an epoch: the script's work there may exceed the grace
        # period, so save now as well, unless the script may change the saved state between two
        # steps.
        plain = updated and not self._reuses and not self._scheduler.is_the_scripts
        plain = plain and self._blocks == self._blocks_before
        if self._stop and plain and between and self._position.is_at_an_end():
            self._write(None)

    def _save(self, place: Place) -> None:
        self._write(place)
        self._began_s = time.monotonic()
        self._at_next = False
        self._put_off = 0
        self._saved = self._position.step

    def _write(self, place: Place) -> None:
        self._run.checkpoints.save(
            self._directory, keeping=self._keeping, wait=self._stop, place=place
        )
