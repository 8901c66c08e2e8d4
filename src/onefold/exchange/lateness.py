"""Finds out which device all others wait for.

Note: who is late
-----------------
A backend that times out does not say for whom it waited: in a collective call all wait for all. So
the device that gives up asks in the store, and every device that waits as well answers, from a
thread. A device that computes, or hangs in the script, does not wait and does not answer: it is
late. One that only had to send may rightly have gone on computing, and is named beside the late
one.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager

from torch.distributed import Store  # type: ignore[attr-defined]  # it is exported

from onefold.system.process import LOOK_S

__all__ = ["ANSWERS_S", "Lateness"]

_ASKED_KEY = "onefold/who-waits"
ANSWERS_S = LOOK_S
"""How long to wait for answers; whoever asks has already waited for a failure to be reported."""


class Lateness:
    """Asks which device is late, and answers for this one.

    Args:
        store: the store behind the group.
        rank: number of this device.
        size: how many devices there are.
    """

    def __init__(self, store: Store, rank: int, size: int) -> None:
        self._store = store
        self._rank = rank
        self._size = size
        # Written by the main thread and read by the watch's: a bool needs no lock for that.
        self._waits = False

    @contextmanager
    def waiting(self) -> Iterator[None]:
        """Note that this device waits for others inside the block."""
        self._waits = True
        try:
            yield
        finally:
            self._waits = False

    def look(self) -> None:
        """Answer if some device has asked; called every `LOOK_S`, from a thread.

        Raises:
            RuntimeError: the store is gone.
        """
        if self._waits and self.is_asked():
            self.answer()

    def is_asked(self) -> bool:
        """Whether a device has timed out and asked who waits."""
        return bool(self._store.check([_ASKED_KEY]))

    def answer(self) -> None:
        """Answer that this device waits, or did until now."""
        self._store.set(_waits_key(self._rank), "1")

    def ask(self) -> None:
        """Ask all devices that wait to answer, from now on.

        Raises:
            RuntimeError: the store is gone.
        """
        self._store.set(_ASKED_KEY, "1")

    def late(self) -> list[int]:
        """List the devices that do not answer within `ANSWERS_S`.

        Raises:
            RuntimeError: the store is gone.
        """
        until = time.monotonic() + ANSWERS_S
        keys = {rank: _waits_key(rank) for rank in range(self._size)}
        while True:
            # Taken before the look, so that the last look comes after the end of the time.
            at_an_end = time.monotonic() > until
            missing = [rank for rank, key in keys.items() if not self._store.check([key])]
            if at_an_end or not missing:
                return missing
            time.sleep(0.05)


def _waits_key(rank: int) -> str:
    return f"onefold/waits/{rank}"
