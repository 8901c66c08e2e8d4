"""The table that a launcher and its workers share: who is at which step, what is to come after it.

Note: no lock
-------------
Each row has one writer: its worker, or for the last row whoever asks to stop, and all of them write
the same. A reader may catch a row half written. That does no harm: it decides by the first number
alone, of which only one byte ever changes, and the steps in messages are read after the end. The
second number of the last row is the lead's, and is there before anybody asks for it.
"""

from __future__ import annotations

import functools
import mmap
import struct

from onefold.core.world import World

__all__ = ["Progress", "progress_of"]

_ROW = struct.Struct("<qq")
_BEGUN, _ENDED = 1, 2


class Progress:
    """Where every worker writes its step, and the launcher whether to stop.

    Args:
        descriptor: the table's memory, made by the launcher.
        devices: number of devices; there is one more row, the launcher's.
    """

    def __init__(self, descriptor: int, devices: int) -> None:
        self._table = mmap.mmap(descriptor, self.nbytes(devices))
        self._launcher = devices * _ROW.size

    @staticmethod
    def nbytes(devices: int) -> int:
        """The size of the table's memory."""
        return _ROW.size * (devices + 1)

    def set_step(self, rank: int, step: int) -> None:
        """Note that ``rank`` has begun ``step``."""
        _ROW.pack_into(self._table, rank * _ROW.size, _BEGUN, step)

    def step_of(self, rank: int) -> int:
        """The step that ``rank`` is at; -1 before the first."""
        begun, step = _ROW.unpack_from(self._table, rank * _ROW.size)
        return int(step) if begun else -1

    def set_ended(self, rank: int) -> None:
        """Note that the script of ``rank`` has ended."""
        step = self.step_of(rank)
        _ROW.pack_into(self._table, rank * _ROW.size, _ENDED, step)

    def has_ended(self, rank: int) -> bool:
        """Whether `set_ended` was called for ``rank``."""
        state, _ = _ROW.unpack_from(self._table, rank * _ROW.size)
        return bool(state == _ENDED)

    def request_stop(self) -> None:
        """Ask the run to save itself and stop at the end of its step."""
        self._table[self._launcher] = 1

    def stop_requested(self) -> bool:
        """Whether `request_stop` was called."""
        return bool(_ROW.unpack_from(self._table, self._launcher)[0])

    def save_after(self, step: int) -> None:
        """Ask all devices to save once ``step`` is done; for the lead, before it begins the step.

        All devices see it then: none ends a step before the lead has begun it.
        """
        struct.pack_into("<q", self._table, self._launcher + 8, step)

    def saves_after(self, step: int) -> bool:
        """Whether `save_after` was called last for ``step``."""
        return bool(_ROW.unpack_from(self._table, self._launcher)[1] == step)


def progress_of(world: World) -> Progress | None:
    """The table shared with onefold's launcher; None if another launcher started this process."""
    if world.progress_descriptor < 0:
        return None
    return _table(world.progress_descriptor, world.size)


@functools.cache
def _table(descriptor: int, devices: int) -> Progress:
    """Map the table once, so that a script that closes descriptors cannot take it away."""
    return Progress(descriptor, devices)
