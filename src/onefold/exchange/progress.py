"""Where the devices of a run are: for the launcher, and for a device that waits for others.

`Progress` is the table in which each device notes where it is, and which onefold's launcher shares
with its workers: what is to come after a step stands there as well. Under another launcher each
process has a table of its own, in memory that other processes of its user can look into; see
`onefold.tools.host_watch`. `Waiting` is the wait of a device that has yet to join the others; later
waits are those of a step, see `onefold.exchange.connections`. Does not load PyTorch.

Note: no lock
-------------
Each row of the table has one writer: its worker, or for the last row whoever asks to stop, and all
of them write the same. A reader may catch a row half written. That does no harm: it decides by the
first number alone, of which only one byte ever changes, and the steps in messages are read after
the end. The second number of the last row is the lead's, and is there before anybody asks for it.
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
"""The logger of devices that wait: what it is told reaches the screen on any device."""
FIRST_S = 10.0
"""After how many seconds a device says whom it waits for."""
_log = logging.getLogger(WAITING)

NoteWait = Callable[[int | None], None]
"""Is called with the device for which a wait begins, -1 for any; and with None where it ends."""
TABLE_LABEL = "onefold-progress"
"""What ``/proc`` calls the memory of a table."""
_BEGUN, _ENDED = 1, 2
_COLUMNS = 8


class DevicePlace(msgspec.Struct, frozen=True, array_like=True):
    """Where a device is; one that has not moved has the same place."""

    step: int
    """-1 before the first."""
    shard: int
    """Which one it computes; -1 for none."""
    wait: int
    """Number of its last wait; odd while it waits."""
    peer: int
    """For which device it waits, or has waited last; -1 for any."""
    begun: int
    """How many shards it has begun, and batches it has asked its loader for."""
    call: int
    """Which call of the trainer it makes together with the others; 0 for none."""
    reads: int
    """1 while it waits for its loader."""

    @property
    def waits(self) -> bool:
        """Whether it waits for other devices."""
        return self.wait % 2 == 1


class Progress:
    """Where every device writes its place, and the launcher whether to stop.

    Args:
        descriptor: the table's memory.
        devices: number of devices; there is one more row, the launcher's.
        access: one of `mmap`'s; by default for writing as well.
    """

    def __init__(self, descriptor: int, devices: int, access: int = mmap.ACCESS_WRITE) -> None:
        memory = mmap.mmap(descriptor, self.nbytes(devices), access=access)
        # A row for each device, then the launcher's. A device's: how far it is, and then what
        # `DevicePlace` has, with shard and peer one more than they are.
        self._rows = memoryview(memory).cast("q")
        self._launcher = devices * _COLUMNS

    @staticmethod
    def nbytes(devices: int) -> int:
        """The size of the table's memory."""
        return _COLUMNS * 8 * (devices + 1)

    def set_step(self, rank: int, step: int) -> None:
        """Note that ``rank`` has begun ``step``."""
        self._rows[rank * _COLUMNS + 1] = step
        self._rows[rank * _COLUMNS] = _BEGUN

    def step_of(self, rank: int) -> int:
        """The step that ``rank`` is at; -1 before the first."""
        return self._rows[rank * _COLUMNS + 1] if self._rows[rank * _COLUMNS] else -1

    def set_shard(self, rank: int, shard: int) -> None:
        """Note that ``rank`` computes a shard; -1 for none."""
        self._rows[rank * _COLUMNS + 2] = shard + 1
        self._rows[rank * _COLUMNS + 5] += 1

    def set_call(self, rank: int, call: int) -> None:
        """Note which call of the trainer ``rank`` makes; 0 for none."""
        self._rows[rank * _COLUMNS + 6] = call

    def set_reading(self, rank: int, reads: bool) -> None:
        """Note that ``rank`` begins to wait for its loader, or has its batch."""
        self._rows[rank * _COLUMNS + 7] = reads
        self._rows[rank * _COLUMNS + 5] += reads

    def set_waiting(self, rank: int, peer: int | None) -> None:
        """Note that ``rank`` begins to wait.

        Args:
            rank: number of the device.
            peer: for which one it waits; -1 for any of them, None for the end of its wait.
        """
        row = rank * _COLUMNS
        waits = self._rows[row + 3] % 2 == 1
        if peer is not None:
            self._rows[row + 4] = peer + 1
        if waits != (peer is not None):
            self._rows[row + 3] += 1

    def place_of(self, rank: int) -> DevicePlace:
        """Where ``rank`` is."""
        row = self._rows[rank * _COLUMNS : (rank + 1) * _COLUMNS]
        _, _, shard, wait, peer, begun, call, reads = row
        return DevicePlace(self.step_of(rank), shard - 1, wait, peer - 1, begun, call, reads)

    def set_ended(self, rank: int) -> None:
        """Note that the script of ``rank`` has ended."""
        self._rows[rank * _COLUMNS + 1] = self.step_of(rank)
        self._rows[rank * _COLUMNS] = _ENDED

    def has_ended(self, rank: int) -> bool:
        """Whether `set_ended` was called for ``rank``."""
        return self._rows[rank * _COLUMNS] == _ENDED

    def request_stop(self) -> None:
        """Ask the run to save itself and stop at the end of its step."""
        self._rows[self._launcher] = 1

    def stop_requested(self) -> bool:
        """Whether `request_stop` was called."""
        return bool(self._rows[self._launcher])

    def save_after(self, step: int) -> None:
        """Ask all devices to save once ``step`` is done; for the lead, before it begins the step.

        All devices see it then: none ends a step before the lead has begun it.
        """
        self._rows[self._launcher + 1] = step

    def saves_after(self, step: int) -> bool:
        """Whether `save_after` was called last for ``step``."""
        return self._rows[self._launcher + 1] == step


def progress_of(context: LaunchContext) -> Progress | None:
    """The table shared with onefold's launcher; None if another launcher started this process."""
    if context.progress_descriptor < 0:
        return None
    return _table(context.progress_descriptor, context.size)


def places_of(context: LaunchContext) -> Progress | None:
    """The table in which this process notes where it is; None if nobody would look at it."""
    if context.progress_descriptor >= 0:
        return progress_of(context)
    others = context.launcher == "torch" and context.size > 1 and not context.network
    return own_table(context.size)[1] if others else None


@functools.cache
def own_table(devices: int) -> tuple[int, Progress]:
    """Make this process's own table, once, and return its descriptor with it."""
    descriptor = memory_file(TABLE_LABEL)
    os.ftruncate(descriptor, Progress.nbytes(devices))
    return descriptor, Progress(descriptor, devices)


@functools.cache
def _table(descriptor: int, devices: int) -> Progress:
    """Map the table once, so that a script that closes descriptors cannot take it away."""
    return Progress(descriptor, devices)


class Waiting:
    """The wait of a device for others that have yet to join; it has a limit, and is told of.

    Once it takes long, two devices of a run say whom they wait for, or the only one of a host.

    Args:
        rank: number of the device.
        timeout_s: the limit of the wait.
        ended: whether the script of a device has ended, so that it will never join.
        host_has_others: whether another process of this host would say the same.
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
        self._says = rank <= 1 or not host_has_others

    @property
    def is_over(self) -> bool:
        """Whether the limit has passed."""
        return time.monotonic() - self._began > self._timeout_s

    def say(self, words: Callable[[], str]) -> None:
        """Say what ``words`` returns if it is time to: first after 10 s, then after 30, 90, ..."""
        waited_s = time.monotonic() - self._began
        if self._says and waited_s >= self._next_s:
            self._next_s *= 3
            _log.warning("device %d has waited for %.0f s: %s", self._rank, waited_s, words())

    def check_peers(self, missing: Sequence[int], words: Callable[[], str] | None = None) -> None:
        """Check and say, but not more often than every `LOOK_S`.

        Args:
            missing: see `check`.
            words: see `say`; by default they name those that are missing.
        """
        if time.monotonic() < self._next_look_s:
            return
        self._next_look_s = time.monotonic() + LOOK_S
        self.check(missing)
        self.say(words or (lambda: f"not yet there: device {', '.join(map(str, missing))}"))

    def check(self, missing: Sequence[int]) -> None:
        """Give up if one of those that are missing will never join, or the limit has passed.

        Raises:
            PeerLost: the script of a device has ended.
            PeerTimeout: the limit has passed.
        """
        for rank in missing:
            if self._ended(rank):
                raise PeerLost.before_start(rank)
        if self.is_over:
            raise PeerTimeout(
                f"device {', '.join(map(str, missing))} did not join within {self._timeout_s:g} s: "
                f"every device must run the same script and make its Trainer",
                device=missing[0],
                step=0,
            )
