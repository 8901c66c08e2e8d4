"""What the lead alone does while the other devices wait for it, however long it takes.

Note: what is slow but alive is alive
-------------------------------------
Reading and writing may take longer than a device waits for another one. So the lead does them in a
thread, and meanwhile all devices meet every moment to hear whether it is done: who waits is told
that the lead is at work, and notices at once if it is not.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from functools import partial
from typing import TypeVar

import torch

from onefold.checkpoint.background import Background
from onefold.core.team import Team
from onefold.engine.engine import Engine

__all__ = ["Lead"]

_log = logging.getLogger("onefold")
_Result = TypeVar("_Result")

_LOOK_S = 1.0
"""How often the devices that wait hear that the lead is still at work."""
_LOOKS_OF_A_LIMIT = 4
"""Where devices wait for less, they hear it so many times as often as they would give up."""


class Lead:
    """The lead's work for a run; all devices call the same, in the same order.

    Args:
        engine: the devices of this process.
        team: who takes part.
        timeout_s: the longest that a device waits for another one.
    """

    def __init__(self, engine: Engine, team: Team, timeout_s: float) -> None:
        self._engine = engine
        self._team = team
        self._timeout_s = timeout_s
        self._look_s = min(_LOOK_S, timeout_s / _LOOKS_OF_A_LIMIT)

    @property
    def is_here(self) -> bool:
        """Whether this process is the lead's."""
        return 0 in self._team.own

    def share(self, number: float) -> float:
        """The lead's number, on every device; that of the others is of no interest."""
        devices = self._team.own_devices
        rows = {
            n: torch.tensor([number], dtype=torch.float64, device=d) for n, d in devices.items()
        }
        return float(self._engine.exchange.transport.share(rows)[0])

    def wait_for(self, job: Background) -> None:
        """Until the lead has done a job; what that has raised is raised on the lead."""
        began, told = time.monotonic(), 1
        while not self._is_done(job):
            passed_s = time.monotonic() - began
            if self.is_here and passed_s > told * self._timeout_s:
                told += 1
                _log.warning(
                    "%s has taken %.0f s so far, and goes on; the run waits for it",
                    job.what,
                    passed_s,
                )

    def do(self, what: str, work: Callable[[], _Result] | None) -> _Result | None:
        """Have the lead do work that may take long.

        Args:
            what: it is, for a warning.
            work: where the lead is.

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
        finally:
            job.abandon()
        return done[0] if done else None

    def hand_out(self, make: Callable[[int], torch.Tensor] | None) -> torch.Tensor:
        """As the exchange does, but one device after the other, while all hear that it is made.

        Args:
            make: where the lead is; see `onefold.exchange.transport.Courier.hand_out`.
        """
        exchange = self._engine.exchange
        if not self._engine.with_others:
            return exchange.transport.hand_out(make)
        mine = torch.empty(0, dtype=torch.uint8)
        for device in range(len(self._team.devices)):
            work = None if make is None else partial(make, device)
            made = self.do("reading the optimizer's state", work)
            part = None if made is None else partial(_part_for, device, made)
            given = exchange.transport.hand_out(part)
            if device in self._team.own:
                mine = given
        return mine

    def _is_done(self, job: Background) -> bool:
        done = job.done_within(self._look_s) if self.is_here else True
        return self.share(float(done)) > 0


def _part_for(wanted: int, made: torch.Tensor, device: int) -> torch.Tensor:
    """What was made for one device, and nothing for the others."""
    return made if device == wanted else made[:0]
