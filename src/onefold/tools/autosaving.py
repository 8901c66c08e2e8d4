"""Saves a run before its steps and at its end, and stops it where it is asked to."""

from __future__ import annotations

from collections.abc import Callable

from onefold.checkpoint.autosave import Autosave, Resumption
from onefold.launcher.membership import RunStopped, at_good_end, only_noting
from onefold.session.run import RunSetup, RunView
from onefold.step.hook import Hook, ScriptCall, Spans, Surrounds
from onefold.step.result import Step
from onefold.system.process import STOPPED_CODE

__all__ = ["Autosaving", "prepare"]


def prepare(start: RunSetup) -> Callable[[RunView], Hook]:
    """Save a run as its options ask."""

    def begin(run: RunView) -> Autosaving:
        assert run.progress is not None
        assert run.resumption is not None
        # Loading may fail on one device alone, for lack of memory say: the others must be told.
        with run.telling_others():
            autosave = Autosave(
                *(run.devices, run.checkpoints, run.position, run.progress, run.resumption),
                blocks=lambda: run.changes().blocks,
            )
        return Autosaving(run, autosave, run.resumption)

    return begin


class Autosaving(Hook):
    """Has `Autosave` save the run.

    Args:
        run: the run.
        autosave: makes its checkpoints.
        resumption: where it goes on, if it was resumed.
    """

    saves_run = True

    def __init__(self, run: RunView, autosave: Autosave, resumption: Resumption) -> None:
        self._run, self._autosave, self._resumption = run, autosave, resumption
        at_good_end(self.finish)

    def around(self, asked: ScriptCall) -> Surrounds:
        """Save what is due before a step.

        Raises:
            RunStopped: the run was asked to stop, and is saved.
        """
        if asked.cut is not None and asked.begins:
            self._autosave.check(asked.cut, gradient=asked.kind == "gradient")
            if self._autosave.before_step(asked.cut):
                raise RunStopped(STOPPED_CODE)
        return None

    def after_step(self, asked: ScriptCall, step: Step, spans: Spans) -> None:
        """Note that a step is done, but for the script's own update, if it makes one."""
        if asked.cut is not None and asked.computed:
            stop, updated = step.outcome.verdict.stops, asked.kind == "step"
            with self._run.telling_others():
                self._autosave.after_step(asked.cut, stop=stop, updated=updated)

    def finish(self) -> None:
        """Save the end of the run, and let another one save itself there."""
        if not self._run.left():
            with self._run.telling_others(), only_noting():
                self._autosave.finish()
                self._resumption.finish()
        with self._run.telling_others():
            self._run.checkpoints.finish()
        self._autosave.leave()

    def close(self) -> None:
        """Let another run save itself there, whatever has become of this one."""
        self._autosave.leave()
