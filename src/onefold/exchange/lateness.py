"""Finds out for whom all others wait.

Note: who is late
-----------------
A backend that has waited in vain does not tell for whom: in a collective call all wait for all. So
who gives up asks in the store, and each device that waits too answers, from a thread. A device that
computes, or hangs in the script, does not wait and does not answer: it is late. One that had only
to send has gone on, may compute by right, and is named beside the one that is late.
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
"""For answers that are still on their way: who asks has waited for word of a failure before."""


class Lateness:
    """What one device knows of it.

    Args:
        store: of the group.
        rank: of this device.
        size: how many devices there are.
    """

    def __init__(self, store: Store, rank: int, size: int) -> None:
        self._store = store
        self._rank = rank
        self._size = size
        self._waits = False

    @contextmanager
    def waiting(self) -> Iterator[None]:
        """This device waits for others inside the block."""
        self._waits = True
        try:
            yield
        finally:
            self._waits = False

    def look(self) -> None:
        """Answer if it was asked; called every `LOOK_S`, from a thread.

        Raises:
            RuntimeError: the store has gone.
        """
        if self._waits and self.is_asked():
            self.answer()

    def is_asked(self) -> bool:
        """Whether a device has waited in vain."""
        return bool(self._store.check([_ASKED_KEY]))

    def answer(self) -> None:
        """Say that this device waits, or did so until now."""
        self._store.set(_waits_key(self._rank), "1")

    def ask(self) -> None:
        """Have all that wait say so, from now on.

        Raises:
            RuntimeError: the store has gone.
        """
        self._store.set(_ASKED_KEY, "1")

    def late(self) -> list[int]:
        """Devices that do not answer, `ANSWERS_S` from now.

        Raises:
            RuntimeError: the store has gone.
        """
        until = time.monotonic() + ANSWERS_S
        keys = {rank: _waits_key(rank) for rank in range(self._size)}
        while True:
            at_an_end = time.monotonic() > until
            missing = [rank for rank, key in keys.items() if not self._store.check([key])]
            if at_an_end or not missing:
                return missing
            time.sleep(0.05)


def _waits_key(rank: int) -> str:
    return f"onefold/waits/{rank}"
