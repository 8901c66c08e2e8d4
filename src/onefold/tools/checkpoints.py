"""Checks the writes of `Trainer.save` and the parameters trained after `Trainer.load`."""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Any

from onefold.checks.model import readable, sorted_values
from onefold.session.run import RunSetup, RunView
from onefold.step.engine import Engine
from onefold.step.hook import Hook, Make, ScriptCall, Surrounds
from onefold.update.optimizers import settings_of

__all__ = ["CheckpointCalls", "prepare"]

_log = logging.getLogger("onefold")


def prepare(start: RunSetup) -> Callable[[RunView], Hook]:
    """Raise early if the first save would raise, while nothing is lost."""

    def begin(run: RunView) -> Hook:
        try:
            _check_can_be_saved(run.engine)
        except TypeError as error:
            if run.context.options.checkpoint:
                raise
            if run.devices.has_lead:  # a run that never saves may continue
                _log.warning("trainer.save will raise in this run: %s", error)
        return CheckpointCalls(run)

    return begin


class CheckpointCalls(Hook):
    """Re-raises errors of background writes, and waits for the last write.

    Args:
        run: the run.
    """

    def __init__(self, run: RunView) -> None:
        self._run = run

    def call(self, asked: ScriptCall, make: Make) -> Any:
        """Re-raise the error of a write before a call over data."""
        if self._run.has_checkpoints and asked.kind == "result" and asked.data is not None:
            self._run.checkpoints.check()
        return make()

    def around(self, asked: ScriptCall) -> Surrounds:
        """Do the same before a step, and warn if it continues differently than the saved run."""
        if self._run.has_checkpoints and asked.cut is not None and asked.begins:
            self._run.checkpoints.check()
            self._run.checkpoints.check_step(asked.name)
        return None

    def finish(self) -> None:
        """Wait until everything is written."""
        if self._run.has_checkpoints:
            with self._run.telling_others():
                self._run.checkpoints.finish()


def _check_can_be_saved(engine: Engine) -> None:
    """Raise at the start if the first save would raise.

    Raises:
        TypeError: the model or the optimizer holds a value that no file can store.
    """
    module = engine.context.module
    with readable(module, engine.placement.gathered):
        sorted_values(module)
    settings_of(engine.context.update.optimizer)
