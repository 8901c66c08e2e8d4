"""Saves and loads a run where its script asks for it: `Trainer.save` and `Trainer.load`."""

from __future__ import annotations

import logging
from typing import Any

from onefold.checkpoint.folder import Checkpoint
from onefold.checkpoint.resume import Checkpoints
from onefold.checks.savable import readable, sorted_values
from onefold.session.runparts import RunParts
from onefold.step.engine import Engine
from onefold.step.hook import Asked, Hook, Make, Surrounds
from onefold.update.optimizers import settings_of

__all__ = ["CheckpointCalls"]

_log = logging.getLogger("onefold")


class CheckpointCalls(Hook):
    """Has `Checkpoints` follow the run, and makes the calls that save and load it.

    Args:
        run: the run.
        checkpoints: of the run.

    Raises:
        TypeError: the run is to save itself, and cannot be saved.
    """

    def __init__(self, run: RunParts, checkpoints: Checkpoints) -> None:
        self._run, self._checkpoints = run, checkpoints
        run.makers["save"], run.makers["load"] = self._save, self._load
        # Refused while nothing is lost yet.
        try:
            _check_can_be_saved(run.engine)
        except TypeError as error:
            if run.context.options.checkpoint:
                raise
            if run.devices.has_lead:  # a run that saves nothing may go on
                _log.warning("trainer.save will refuse this run: %s", error)

    def _save(self, asked: Asked) -> Any:
        return self._checkpoints.save(asked.given, **asked.choices)

    def _load(self, asked: Asked) -> Checkpoint | None:
        return self._checkpoints.load(asked.given, **asked.choices)

    def call(self, asked: Asked, make: Make) -> Any:
        """Raise what the writing of a checkpoint has raised, before data is gone through."""
        if asked.kind == "result" and asked.data is not None:
            self._checkpoints.check()
        return make()

    def around(self, asked: Asked) -> Surrounds:
        """Raise the same before a step, and warn where it trains other parameters than before."""
        if asked.cut is not None and asked.begins:
            self._checkpoints.check()
            self._checkpoints.check_trained(asked.name)
        return None

    def finish(self) -> None:
        """Wait until everything is written."""
        with self._run.telling_others():
            self._checkpoints.finish()


def _check_can_be_saved(engine: Engine) -> None:
    """Refuse at the start what the first save would refuse.

    Raises:
        TypeError: the model or the optimizer holds a value that no file can.
    """
    module = engine.context.module
    with readable(module, engine.placement.gathered):
        sorted_values(module)
    settings_of(engine.context.update.optimizer)
