"""Notes where this process is, for whoever looks for devices that wait, and stops on request."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any

from onefold.exchange.progress import Progress
from onefold.session.runparts import RunParts
from onefold.step.hook import Asked, Hook, Make, Spans, Surrounds
from onefold.step.result import Step

__all__ = ["Places", "StopRequests"]


class Places(Hook):
    """Notes where a process is: in which step and shard, at which call, waiting for which batch.

    Args:
        run: the run.
        places: the table in which it is noted.
    """

    def __init__(self, run: RunParts, places: Progress) -> None:
        self._position, self._places, self._rank = run.position, places, run.context.rank
        self._note()
        for replica in run.engine.context.replicas:
            replica.note_shard = partial(places.set_shard, self._rank)
        run.engine.agreement.note_call = partial(places.set_call, self._rank)
        run.batches.note_reading = partial(places.set_reading, self._rank)

    def call(self, asked: Asked, make: Make) -> Any:
        """Note the step anew where the script has had the run go on from elsewhere."""
        try:
            return make()
        finally:
            if asked.kind == "load":
                self._note()

    def after_step(self, asked: Asked, step: Step, spans: Spans) -> None:
        """Note which step is next: later failures are reported as in that step."""
        if asked.computed:
            self._note()

    def _note(self) -> None:
        self._places.set_step(self._rank, self._position.step + 1)


class StopRequests(Hook):
    """Tells the step whether this process was asked to stop; others may not know of it yet.

    Devices see a signal at different times; the step makes one answer of it.

    Args:
        run: the run.
        progress: the table in which the launcher asks for it, if it does.
        requests: what has come by signals, which is made longer by each.
    """

    def __init__(self, run: RunParts, progress: Progress | None, requests: Sequence[bool]) -> None:
        self._position, self._progress, self._requests = run.position, progress, requests
        self._stops_after = run.context.options.stops_after

    def around(self, asked: Asked) -> Surrounds:
        """Note whether to stop, right before all devices agree on it."""
        asked.asked_to_stop |= (
            bool(self._requests)
            or self._stops_after == self._position.step + 1
            or (self._progress is not None and self._progress.stop_requested())
        )
        return None
