"""Has the lead do work while the other devices wait for it, however long it takes.

Note: slow but alive is alive
-----------------------------
Reading and writing may take longer than a device waits for another. So the lead does them in a
thread, and meanwhile all devices meet again and again and share whether it is done: those that wait
know that the lead is at work, and notice at once if it is not. Only the training thread of the lead
speaks to the others; the work itself must make no call that they would have to make as well.
"""

from __future__ import annotations

import logging
import math
import time
from collections.abc import Callable
from functools import partial
from typing import TypeVar

import torch

from onefold.checkpoint.background import Background
from onefold.core.jsonvalue import to_bytes
from onefold.core.roster import Team
from onefold.engine.engine import Engine

__all__ = ["Lead", "Patience", "told_all"]

_log = logging.getLogger("onefold")
_Result = TypeVar("_Result")

_LOOK_S = 1.0
_LOOKS_OF_A_LIMIT = 4
"""How many times it does so, at least, within a device's time limit, however short."""


class Patience:
    """Warns now and then while something takes long.

    Args:
        what: what it is.
        every_s: how often to warn.
    """

    def __init__(self, what: str, every_s: float) -> None:
        self._what, self._every_s = what, every_s
        self._began, self._warnings = time.monotonic(), 1

    def look(self) -> None:
        """Warn if it is time to."""
        passed_s = time.monotonic() - self._began
        # As often as a wait would have failed, so that a hung disk does not go unnoticed.
        if passed_s > self._warnings * self._every_s:
            self._warnings += 1
            _log.warning(
                "%s has taken %.0f s so far, and goes on; the run waits for it",
                self._what,
                passed_s,
            )


class Lead:
    """The lead's work for a run; all devices make the same calls in the same order.

    Args:
        engine: the devices of this process.
        team: who takes part.
        timeout_s: the longest that a device waits for another.
    """

    def __init__(self, engine: Engine, team: Team, timeout_s: float) -> None:
        self._engine = engine
        self._team = team
        self._timeout_s = timeout_s
        self.look_s = min(_LOOK_S, timeout_s / _LOOKS_OF_A_LIMIT)
        """How often the lead tells the waiting devices that it is still at work."""

    @property
    def is_here(self) -> bool:
        """Whether this process is the lead's."""
        return self._team.has_lead

    def share(self, number: float) -> float:
        """Return the lead's number on every device; the numbers of the others are ignored."""
        return float(self._shared(number)[0])

    def least(self, number: float) -> float:
        """Return the least of the numbers of all devices, on every device."""
        return float(self._shared(number).min())

    def _shared(self, number: float) -> torch.Tensor:
        devices = self._team.own_devices
        rows = {
            n: torch.tensor([number], dtype=torch.float64, device=d) for n, d in devices.items()
        }
        return self._engine.exchange.transport.share(rows)

    def wait_for(self, job: Background) -> None:
        """Wait until the lead has done a job; what the job has raised is raised on the lead."""
        patience = self.patience(job)
        while not self._is_done(job):
            patience.look()

    def patience(self, job: Background) -> Patience:
        """Begin to wait for a job, and be ready to warn if that takes long."""
        return Patience(job.what, self._timeout_s if self.is_here else math.inf)

    def do(self, what: str, work: Callable[[], _Result] | None) -> _Result | None:
        """Have the lead do work that may take long.

        Args:
            what: what the work is, for a warning.
            work: the work, on the lead's process; None elsewhere.

        Returns:
            On the lead what the work returned; elsewhere None.
        """
        if not self._engine.with_others:
            return None if work is None else work()
        done: list[_Result] = []
        job = Background(what, gives_way=False)
        try:
            if self.is_here and work is not None:
                job.start(lambda: done.append(work()))
            self.wait_for(job)
        # If a peer is lost meanwhile, the thread may still read files that the caller is to close.
        finally:
            job.abandon()
        return done[0] if done else None

    def hand_out(self, make: Callable[[int], torch.Tensor] | None) -> torch.Tensor:
        """Hand out as the exchange does, but make one device's part at a time, by `do`.

        Making a part means reading files, and no device may take that for a hang.

        Args:
            make: on the lead's process; see `onefold.exchange.transport.Courier.hand_out`.
        """
        exchange = self._engine.exchange
        if not self._engine.with_others:
            return exchange.transport.hand_out(make)
        mine = torch.empty(0, dtype=torch.uint8)
        for device in range(len(self._team.devices)):
            work = None if make is None else partial(make, device)
            made = self.do("reading the optimizer's state", work)
            part = None if made is None else partial(_part_for, device, made)
            # All take part each time, and all but one get nothing: the lead never holds more than
            # one device's part.
            given = exchange.transport.hand_out(part)
            if device in self._team.own:
                mine = given
        return mine

    def _is_done(self, job: Background) -> bool:
        # The others do not sleep: they wait in `share` for as long as the lead waits for the job.
        done = job.done_within(self.look_s) if self.is_here else True
        return self.share(float(done)) > 0


def _part_for(wanted: int, made: torch.Tensor, device: int) -> torch.Tensor:
    """Return what was made for one device, and an empty stretch of it for the others."""
    return made if device == wanted else made[:0]


def told_all(said: object) -> Callable[[int], torch.Tensor]:
    """Make a function for `hand_out` that gives every process the same."""
    text = to_bytes(said)
    return lambda device: torch.frombuffer(bytearray(text), dtype=torch.uint8)
