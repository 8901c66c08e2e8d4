"""Stores the position of each device of a run, for the launcher and for devices that wait.

`Progress` is the table in which each device notes its position, and which onefold's launcher shares
with its workers. It also holds the request to stop. Under another launcher each process has its own
table, in memory that other processes of its user can read; see `onefold.tools.host_watch`.
`Waiting` is the wait for devices that have yet to join; `onefold.exchange.connections` handles
later waits, within steps. This module does not load PyTorch.

Note: no lock
-------------
Each row of the table has one writer: its worker. The last row is written by any process that
requests a stop, and all write the same value. A reader may see a half-written row, which does no
harm: decisions depend only on the first number, of which only one byte ever changes, and the step
numbers in messages are read after the processes have ended.
"""

from __future__ import annotations

import functools
import logging
import mmap
import os
import time
from collections.abc import Callable, Sequence

import msgspec

from onefold.core.options import LaunchContext
from onefold.errors import PeerLost, PeerTimeout
from onefold.system.process import LOOK_S
from onefold.system.safe_files import memory_file

__all__ = [
    "TABLE_LABEL",
    "WAITING",
    "DevicePlace",
    "NoteWait",
    "Progress",
    "Waiting",
    "own_table",
    "places_of",
    "progress_of",
]

WAITING = "onefold.waiting"
"""Logger of waiting devices; its messages reach the screen from any device."""
FIRST_S = 10.0
"""Seconds after which a device reports which device it waits for."""
_log = logging.getLogger(WAITING)

NoteWait = Callable[[int | None], None]
"""Called with the device for which a wait begins (-1 for any), and with None when it ends."""
TABLE_LABEL = "onefold-progress"
"""Name of a table's memory in ``/proc``."""
_BEGUN, _ENDED = 1, 2
_COLUMNS = 8


class DevicePlace(msgspec.Struct, frozen=True, array_like=True):
    """Position of a device. It stays equal as long as the device makes no progress."""

    step: int
    """Step of the run; -1 before the first."""
    shard: int
    """Number of the shard being computed; -1 for none."""
    wait: int
    """Counter of the starts and ends of its waits; odd while it waits."""
    peer: int
    """Device of the current or last wait; -1 for any."""
    begun: int
    """Number of shards started, plus batches requested from its loader."""
    call: int
    """Collective call of the trainer that it makes; 0 for none."""
    reads: int
    """1 while it waits for its loader."""

    @property
    def waits(self) -> bool:
        """Whether the device waits for other devices."""
        return self.wait % 2 == 1


class Progress:
    """Table of every device's position, and of requests to save or stop.

    Args:
        descriptor: memory of the table.
        devices: number of devices; the table has one more row, for the launcher.
        access: an access mode of `mmap`; by default read and write.
    """

    def __init__(self, descriptor: int, devices: int, access: int = mmap.ACCESS_WRITE) -> None:
        memory = mmap.mmap(descriptor, self.nbytes(devices), access=access)
        # Rows of the devices, then the launcher's. A device's row: its state, then the fields of
        # `DevicePlace`, with shard and peer increased by one, so that 0 means none.
        self._rows = memoryview(memory).cast("q")
        self._launcher = devices * _COLUMNS

    @staticmethod
    def nbytes(devices: int) -> int:
        """Return the size of the table's memory."""
        return _COLUMNS * 8 * (devices + 1)

    def set_step(self, rank: int, step: int) -> None:
        """Note that ``rank`` started ``step``."""
        # Write the state last: a reader that sees it also finds the step.
        self._rows[rank * _COLUMNS + 1] = step
        self._rows[rank * _COLUMNS] = _BEGUN

    def step_of(self, rank: int) -> int:
        """Return the step that ``rank`` is in; -1 before the first."""
        return self._rows[rank * _COLUMNS + 1] if self._rows[rank * _COLUMNS] else -1

    def set_shard(self, rank: int, shard: int) -> None:
        """Note that ``rank`` computes a shard; -1 for none."""
        self._rows[rank * _COLUMNS + 2] = shard + 1
        # Count every start, so that a watcher sees progress even if the shard's number repeats.
        self._rows[rank * _COLUMNS + 5] += 1

    def set_call(self, rank: int, call: int) -> None:
        """Note which collective call of the trainer ``rank`` makes; 0 for none."""
        self._rows[rank * _COLUMNS + 6] = call

    def set_reading(self, rank: int, reads: bool) -> None:
        """Note that ``rank`` starts to wait for its loader, or got its batch."""
        self._rows[rank * _COLUMNS + 7] = reads
        self._rows[rank * _COLUMNS + 5] += reads

    def set_waiting(self, rank: int, peer: int | None) -> None:
        """Note that ``rank`` starts or stops waiting.

        Args:
            rank: number of the device.
            peer: the device that it waits for; -1 for any, None at the end of the wait.
        """
        row = rank * _COLUMNS
        waits = self._rows[row + 3] % 2 == 1
        if peer is not None:
            self._rows[row + 4] = peer + 1
        # Count only changes: a second note of the same wait must not end it.
        if waits != (peer is not None):
            self._rows[row + 3] += 1

    def place_of(self, rank: int) -> DevicePlace:
        """Return the position of ``rank``."""
        # Copy the row in one slice; it may still be half written, see the note at the head.
        row = self._rows[rank * _COLUMNS : (rank + 1) * _COLUMNS]
        _, _, shard, wait, peer, begun, call, reads = row
        return DevicePlace(self.step_of(rank), shard - 1, wait, peer - 1, begun, call, reads)

    def set_ended(self, rank: int) -> None:
        """Note that the script of ``rank`` ended."""
        # Write the step first: without one, a row of zeros would read as step 0 once the state
        # changes.
        self._rows[rank * _COLUMNS + 1] = self.step_of(rank)
        self._rows[rank * _COLUMNS] = _ENDED

    def has_ended(self, rank: int) -> bool:
        """Whether `set_ended` was called for ``rank``."""
        return self._rows[rank * _COLUMNS] == _ENDED

    def request_stop(self) -> None:
        """Request that the run saves itself and stops at the end of its step."""
        self._rows[self._launcher] = 1

    def stop_requested(self) -> bool:
        """Whether `request_stop` was called."""
        return bool(self._rows[self._launcher])


def progress_of(context: LaunchContext) -> Progress | None:
    """Return the table shared with onefold's launcher; None under another launcher."""
    if context.progress_descriptor < 0:
        return None
    return _table(context.progress_descriptor, context.size)


def places_of(context: LaunchContext) -> Progress | None:
    """Return the table in which this process notes its position; None if no process reads one."""
    if context.progress_descriptor >= 0:
        return progress_of(context)
    others = context.launcher == "torch" and context.size > 1 and not context.network
    return own_table(context.size)[1] if others else None


@functools.cache
def own_table(devices: int) -> tuple[int, Progress]:
    """Make this process's own table, once; return its descriptor and the table."""
    # Anonymous memory under a label, by which `onefold.tools.host_watch` finds it in /proc.
    descriptor = memory_file(TABLE_LABEL)
    os.ftruncate(descriptor, Progress.nbytes(devices))
    return descriptor, Progress(descriptor, devices)


@functools.cache
def _table(descriptor: int, devices: int) -> Progress:
    """Map the table once, so that a script that closes descriptors cannot take it away."""
    return Progress(descriptor, devices)


class Waiting:
    """The wait for devices that have yet to join; it has a limit, and is logged.

    If it takes long, the first two devices of a run, and a device that is alone on its host, log
    which devices they wait for.

    Args:
        rank: number of this device.
        timeout_s: the limit of the wait.
        ended: whether the script of a device ended, so that it will never join.
        host_has_others: whether another process of this host logs the same.
    """

    def __init__(
        self,
        rank: int,
        timeout_s: float,
        *,
        ended: Callable[[int], bool] = lambda rank: False,
        host_has_others: bool = True,
    ) -> None:
        self._rank, self._timeout_s, self._ended = rank, timeout_s, ended
        self._began, self._next_s = time.monotonic(), FIRST_S
        self._next_look_s = self._began + LOOK_S
        # Let only some devices log, because all would log the same lines.
        self._says = rank <= 1 or not host_has_others

    @property
    def is_over(self) -> bool:
        """Whether the limit has passed."""
        return time.monotonic() - self._began > self._timeout_s

    def say(self, words: Callable[[], str]) -> None:
        """Log the result of ``words`` if it is due: first after 10 s, then after 30, 90, ..."""
        waited_s = time.monotonic() - self._began
        if self._says and waited_s >= self._next_s:
            self._next_s *= 3
            _log.warning("device %d has waited for %.0f s: %s", self._rank, waited_s, words())

    def check_peers(self, missing: Sequence[int], words: Callable[[], str] | None = None) -> None:
        """Check and log, at most once per `LOOK_S`.

        Args:
            missing: see `check`.
            words: see `say`; by default the missing devices.
        """
        # Callers poll far more often than a check of all peers is worth.
        if time.monotonic() < self._next_look_s:
            return
        self._next_look_s = time.monotonic() + LOOK_S
        self.check(missing)
        self.say(words or (lambda: f"still missing: device {', '.join(map(str, missing))}"))

    def check(self, missing: Sequence[int]) -> None:
        """Raise if a missing device will never join, or the limit has passed.

        Raises:
            PeerLost: the script of a device ended.
            PeerTimeout: the limit has passed.
        """
        for rank in missing:
            if self._ended(rank):
                raise PeerLost.before_start(rank)
        if self.is_over:
            raise PeerTimeout(
                f"device {', '.join(map(str, missing))} did not join within {self._timeout_s:g} s: "
                f"every device must run the same script and create its Trainer",
                device=missing[0],
                step=0,
            )
