"""Says whom a device waits for before it has joined the others, once that takes long.

Later waits are those of a step, see `onefold.exchange.connections`. Does not load PyTorch.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable

__all__ = ["FIRST_S", "WAITING", "Waiting"]

WAITING = "onefold.waiting"
"""The logger of those who wait: what it is told reaches the screen on any device."""
FIRST_S = 10.0
"""After how many seconds a device says whom it waits for."""
_log = logging.getLogger(WAITING)


class Waiting:
    """Says whom a device waits for, once that takes long; two devices of a run are enough to do so.

    Args:
        rank: number of the device.
        first_s: after how many seconds it does so first, and then after three times as many.
        host_has_others: whether another process of this host would say the same.
    """

    def __init__(
        self, rank: int, *, first_s: float = FIRST_S, host_has_others: bool = True
    ) -> None:
        self._rank, self._next_s, self._began = rank, first_s, time.monotonic()
        self._says = rank <= 1 or not host_has_others

    def look(self, words: Callable[[], str]) -> None:
        """Say what ``words`` returns if it is time to."""
        waited_s = time.monotonic() - self._began
        if self._says and waited_s >= self._next_s:
            self._next_s *= 3
            _log.warning("device %d has waited for %.0f s: %s", self._rank, waited_s, words())
