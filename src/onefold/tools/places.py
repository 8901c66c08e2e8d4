"""Records the position of this process, for hang reports."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

from onefold.exchange.progress import Progress
from onefold.session.run import RunSetup, RunView
from onefold.step.hook import Hook, Make, ScriptCall, Spans
from onefold.step.result import Step

__all__ = ["Places", "prepare"]


def prepare(start: RunSetup) -> Callable[[RunView], Hook | None]:
    """Record positions if there is a table for them."""
    return lambda run: Places(run, run.places) if run.places is not None else None


class Places(Hook):
    """Records a process's step and shard, its current call, and whether it waits for a batch.

    Args:
        run: the run.
        places: table of positions.
    """

    def __init__(self, run: RunView, places: Progress) -> None:
        self._position, self._places, self._seat = run.position, places, run.devices.seats[0]
        self._note()
        for replica in run.engine.context.replicas:
            replica.note_shard = partial(places.set_shard, self._seat)
        run.engine.agreement.note_call = partial(places.set_call, self._seat)
        run.batches.note_reading = partial(places.set_reading, self._seat)

    def call(self, asked: ScriptCall, make: Make) -> Any:
        """Record the step again after `Trainer.load` has moved the run."""
        try:
            return make()
        finally:
            if asked.kind == "load":
                self._note()

    def after_step(self, asked: ScriptCall, step: Step, spans: Spans) -> None:
        """Record the next step: later failures are reported as failures of that step."""
        if asked.computed:
            self._note()

    def _note(self) -> None:
        self._places.set_step(self._seat, self._position.step + 1)
