"""The table of steps that a launcher and its workers share: who is where, and whether to stop."""

from __future__ import annotations

import functools
import mmap
import struct

from onefold.core.world import World

__all__ = ["Progress", "progress_of"]

_ROW = struct.Struct("<qq")
_BEGUN, _ENDED = 1, 2


class Progress:
    """A small table: every worker writes its step there, and the launcher whether to stop.

    Args:
        descriptor: of the table's memory, made by the launcher.
        devices: number of rows.
    """

    def __init__(self, descriptor: int, devices: int) -> None:
        self._table = mmap.mmap(descriptor, self.nbytes(devices))
        self._launcher = devices * _ROW.size

    @staticmethod
    def nbytes(devices: int) -> int:
        """How large the table's memory is."""
        return _ROW.size * (devices + 1)

    def set_step(self, rank: int, step: int) -> None:
        """Note that ``rank`` has begun ``step``."""
        _ROW.pack_into(self._table, rank * _ROW.size, _BEGUN, step)

    def step_of(self, rank: int) -> int:
        """The step that ``rank`` is at, -1 before the first."""
        begun, step = _ROW.unpack_from(self._table, rank * _ROW.size)
        return int(step) if begun else -1

    def set_ended(self, rank: int) -> None:
        """Note that the script of ``rank`` has come to its end."""
        step = self.step_of(rank)
        _ROW.pack_into(self._table, rank * _ROW.size, _ENDED, step)

    def has_ended(self, rank: int) -> bool:
        """Whether `set_ended` was called for ``rank``."""
        state, _ = _ROW.unpack_from(self._table, rank * _ROW.size)
        return bool(state == _ENDED)

    def request_stop(self) -> None:
        """Ask the run to save itself and stop at the end of its step."""
        _ROW.pack_into(self._table, self._launcher, 1, 0)

    def stop_requested(self) -> bool:
        """Whether `request_stop` was called."""
        return bool(_ROW.unpack_from(self._table, self._launcher)[0])


def progress_of(world: World) -> Progress | None:
    """The table shared with onefold's launcher, if that started this process."""
    if world.progress_descriptor < 0:
        return None
    return _table(world.progress_descriptor, world.size)


@functools.cache
def _table(descriptor: int, devices: int) -> Progress:
    """Mapped once: a script that closes descriptors does not reach it any more."""
    return Progress(descriptor, devices)
