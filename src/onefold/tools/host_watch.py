"""Hang detection for processes of several hosts, and for those of another launcher.

Each process runs two threads. One checks the positions of the devices of its host. The other
communicates with the threads of other hosts through the run's store, over a separate connection: it
may block there forever, because the process that serves the store may be the stopped one.

Note: reading positions
-----------------------
A process writes its position, and its stacks on request, to anonymous memory. Other processes of
the same user open both through ``/proc``, but only after a device has waited for a while. An
untrusted user may have put another entry into the store, so an entry is opened only if it is such
memory.

Note: one question at a time
----------------------------
A device that has waited for long asks all hosts through the store: question 1, 2, and so on. The
first device to ask owns the question. On each host, one process answers for all devices there: the
first to increment a counter. The owner then decides, and publishes the outcome. The report goes to
the terminal of device 0 if its host has answered, otherwise to the terminal of the owner. All other
processes note that the wait was reported. If the store does not respond, each host reports
separately.

Note: costs
-----------
Positions are numbers in memory. The threads wake up every half second and read them. If there are
several hosts, one process per host checks the store every two seconds; the others do so only after
making no progress for a while.
"""

from __future__ import annotations

import atexit
import contextlib
import functools
import json
import logging
import mmap
import os
import socket
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec
from torch.distributed import Store

from onefold.core.options import RECORD_FILE, LaunchContext
from onefold.exchange.connections import host_identity
from onefold.exchange.group import Rendezvous
from onefold.exchange.progress import TABLE_LABEL, WAITING, Progress, own_table, progress_of
from onefold.launcher.hang import (
    AGAIN_S,
    STACKS_LABEL,
    DeviceReport,
    HostDevice,
    Waits,
    answer_with_stacks,
    late_of,
    record_hang,
    report_of,
)
from onefold.session.run import RunSetup, RunView
from onefold.system.process import LOOK_S
from onefold.system.safe_files import memory_file

__all__ = ["HostWatch", "prepare", "prepare_process", "watch_for_hangs"]

_log = logging.getLogger("onefold")
_screen = logging.getLogger(WAITING)
_SELDOM_S, _STILL_S, _LONG_STILL_S = 2.0, 5.0, 10.0
"""Interval between checks for a question, and times without progress after which to check more
often, in seconds."""
_MEETING_S, _SILENT_S, _CLOSE_S = 10.0, 4.0, 2.0
_ANSWERS_S, _AGAIN_S, _STACKS_S, _OUTCOME_S, _PAUSE_S = 3.0, 1.5, 8.0, 20.0, 0.2
"""Time limits, in seconds: for answers, for answers from hosts that were silent before, for answers
with stacks, and for the outcome of a question."""


class _Outcome(msgspec.Struct, frozen=True, array_like=True):
    """The outcome of a question."""

    reported: bool
    """Whether there is a report."""
    step: int = -1
    text: str = ""
    """The report and its step, if the host of device 0 is to print it."""


class _Question(msgspec.Struct, frozen=True, array_like=True):
    """A question to all hosts about the state of their devices."""

    rank: int
    """Rank of the device that asks."""
    stacks: bool
    """Whether answers include stacks, for a report."""


def prepare_process(context: LaunchContext) -> None:
    """Show reports on the launcher's terminal if the output of this device goes to a log."""
    if context.screen_descriptor >= 0 and context.rank:
        _screen.addHandler(logging.StreamHandler(os.fdopen(context.screen_descriptor, "w")))


def prepare(start: RunSetup) -> Callable[[RunView], None]:
    """Watch for hangs if devices write their positions and no onefold launcher reads them."""

    def begin(run: RunView) -> None:
        if run.places is not None and run.engine.context.with_others:
            watch_for_hangs(start.context)

    return begin


@functools.cache
def watch_for_hangs(context: LaunchContext) -> None:
    """Report hanging devices from now on, and answer questions of other hosts.

    Call it after the process has joined the others.
    """
    size, table, stacks = context.size, context.progress_descriptor, memory_file(STACKS_LABEL)
    progress = progress_of(context)
    if progress is None:
        table, progress = own_table(size)
    answer_with_stacks(stacks)
    own = HostDevice(context.rank, os.getpid(), progress, stacks)
    store = Rendezvous(context, size, context.options.timeout_s).apart("waits")
    folder = context.options.recorded_in
    record = Path(folder, RECORD_FILE) if folder else None
    atexit.register(HostWatch(own, table, store=store, size=size, record=record).close)


class HostWatch:
    """The watching threads of one process, and their state.

    Args:
        own: device of this process.
        table: descriptor of the table with its position.
        store: store through which the threads of all processes communicate.
        size: number of devices.
        record: path of the run's record; the file may not exist.
    """

    def __init__(
        self, own: HostDevice, table: int, *, store: Store, size: int, record: Path | None = None
    ) -> None:
        self._rank, self._size, self._record = own.rank, size, record
        self._host, self._name = host_identity(), socket.gethostname()
        self._waits, self._descriptors = Waits(), (table, own.stacks)
        self._devices = {own.rank: own}
        """Known devices of this host, by rank."""
        self._store: Store | None = store
        self._met, self._is_first = 0, False
        self._number, self._asks = 1, False
        """Number of the next question, and whether this process is to ask it."""
        self._silent: set[int] = set()
        """Devices that did not answer the last question."""
        self._next_s = self._polled_s = 0.0
        self._pause_s = LOOK_S
        self._called_s: float | None = None
        self._began_s, self._end = time.monotonic(), threading.Event()
        # Before the first step, which takes longer than others.
        self._waits.update([own], self._began_s)
        self._threads = [
            threading.Thread(target=self._forever, args=(each,), name=name, daemon=True)
            for each, name in (
                (self._check_devices, "onefold waits"),
                (self._talk, "onefold answers"),
            )
        ]
        for thread in self._threads:
            thread.start()

    def close(self) -> None:
        """End the threads. One that blocks in the store is left to the operating system."""
        self._end.set()
        for thread in self._threads:
            thread.join(_CLOSE_S)

    def _forever(self, act: Callable[[float], None]) -> None:
        while not self._end.wait(self._pause_s):
            try:
                act(time.monotonic())
            except Exception:
                # A report must not end the run that it is about.
                _log.info("hang detection stopped", exc_info=True)
                self._store = None
                return

    def _check_devices(self, now_s: float) -> None:
        """Check the devices of this host; let the other thread ask, or report without the store."""
        waits = self._waits
        waits.update([*self._devices.values()], now_s)
        self._pause_s = LOOK_S if waits.still_s(self._rank, now_s) < _STILL_S else _PAUSE_S
        self._asks = now_s >= self._next_s and waits.has_question(now_s, self._rank)
        called_s = self._called_s
        if not self._asks or (
            self._store is not None and (called_s is None or now_s - called_s < _SILENT_S)
        ):
            return
        self._next_s = now_s + AGAIN_S
        late = late_of(self._standings(), waits.usual_s, self._size)
        # The first waiting device on this host reports.
        if waits.untold(late, now_s) and late[0].rank == self._rank:
            self._tell(late[0].place.step, report_of(self._standings(stacks=True), self._size))

    def _tell(self, step: int, text: str) -> None:
        """Print a report; the host of device 0, which has the record, also records it."""
        _screen.warning("onefold: %s", text)
        if 0 in self._devices:
            record_hang(self._record, step, text)

    def _standings(self, *, stacks: bool = False) -> list[DeviceReport]:
        host = "" if len(self._devices) == self._size else self._name
        devices = [self._devices[rank] for rank in sorted(self._devices)]
        return self._waits.standings(devices, time.monotonic(), host=host, stacks=stacks)

    def _talk(self, now_s: float) -> None:
        """Ask the other hosts, or answer their question."""
        store = self._store
        if store is None:
            return
        if not self._met or now_s - self._began_s < _MEETING_S:
            self._meet(store)
        if self._asks:
            self._next_s, self._asks = now_s + AGAIN_S, False
            self._ask(store)
        elif self._is_due(now_s) and self._called(store.check, [self._key("question")]):
            self._answer(store)

    def _is_due(self, now_s: float) -> bool:
        """Whether to check for a question from another host."""
        if len(self._devices) == self._size:
            return False
        still_s = self._waits.still_s(self._rank, now_s)
        often = self._is_first and still_s > _STILL_S
        seldom = self._is_first or still_s > _LONG_STILL_S
        if not often and not (seldom and now_s - self._polled_s > _SELDOM_S):
            return False
        self._polled_s = now_s
        return True

    def _called(self, call: Callable[..., Any], *given: object) -> Any:
        """Call the store; the other thread sees how long the call takes."""
        self._called_s = time.monotonic()
        try:
            return call(*given)
        finally:
            self._called_s = None

    def _key(self, topic: str) -> str:
        return f"{self._number}/{topic}"

    def _meet(self, store: Store) -> None:
        """Announce this process to the others of its host, and find them."""
        count, key = f"{self._host}/count", f"{self._host}/{{}}".format
        if not self._met:
            number = self._called(store.add, count, 1)
            words = json.dumps([self._rank, self._devices[self._rank].pid, *self._descriptors])
            self._called(store.set, key(number), words)
            self._is_first, self._met = number == 1, 1
        # A process that incremented the counter may not have written its entry yet.
        while self._met <= self._called(store.add, count, 0) and self._called(
            store.check, [key(self._met)]
        ):
            given = msgspec.json.decode(self._called(store.get, key(self._met)), type=list[int])
            self._met += 1
            with contextlib.suppress(OSError):
                device = _opened(*given, size=self._size)
                # A new dict, because the other thread iterates over the old one.
                self._devices = {device.rank: device} | self._devices

    def _ask(self, store: Store) -> None:
        """Ask for the state of all devices; if some hang, ask again with stacks and report."""
        waits, silent = self._waits, self._silent
        known = self._asked(store)
        if known:
            self._publish(store, _Outcome(reported=False))
        # A host that was busy may answer the next time.
        if self._silent - silent or not late_of(known, waits.usual_s, self._size):
            return
        standings = self._asked(store, stacks=True)
        if not standings:
            return
        late, text, step = late_of(standings, waits.usual_s, self._size), "", -1
        if late:
            step = late[0].place.step
            text = report_of(standings, self._size)
            waits.note_told(time.monotonic())
        here = 0 in self._devices or all(each.rank for each in standings)
        self._publish(store, _Outcome(reported=bool(late), step=step, text="" if here else text))
        if late and here:
            self._tell(step, text)

    def _asked(self, store: Store, *, stacks: bool = False) -> list[DeviceReport]:
        """Ask, and return the state of the devices that answer in time.

        Returns:
            Nothing if another device asked first; its question is answered instead.
        """
        question = msgspec.json.encode(_Question(self._rank, stacks)).decode()
        first = self._called(store.compare_set, self._key("question"), "", question)
        if first.decode() != question:
            self._answer(store)
            return []
        # Before collecting stacks, so that no other process of this host answers.
        self._called(store.add, self._key(self._host), 1)
        found = {each.rank: each for each in self._standings(stacks=stacks)}
        began_s, number, every = time.monotonic(), 1, set(range(self._size))
        limit_s = _STACKS_S if stacks else _ANSWERS_S
        while (missing := every - found.keys()) and not self._end.is_set():
            waited_s = time.monotonic() - began_s
            if waited_s > limit_s or (missing <= self._silent and waited_s > _AGAIN_S):
                break
            key = self._key(f"answer/{number}")
            if not self._called(store.check, [key]):
                self._end.wait(_PAUSE_S)
                continue
            number += 1
            text = self._called(store.get, key)
            for each in msgspec.json.decode(text, type=list[DeviceReport]):
                found.setdefault(each.rank, each)
        self._silent = every - found.keys()
        return [found[rank] for rank in sorted(found)]

    def _publish(self, store: Store, outcome: _Outcome) -> None:
        """Publish the outcome of a question, and move to the next one."""
        self._called(store.set, self._key("outcome"), msgspec.json.encode(outcome).decode())
        self._number += 1

    def _answer(self, store: Store) -> None:
        """Answer for this host, unless another process does, and wait for the outcome."""
        given = self._called(store.get, self._key("question"))
        stacks = msgspec.json.decode(given, type=_Question).stacks
        answers = self._called(store.add, self._key(self._host), 1) == 1
        if answers:
            text = msgspec.json.encode(self._standings(stacks=stacks)).decode()
            number = self._called(store.add, self._key("answers"), 1)
            self._called(store.set, self._key(f"answer/{number}"), text)
        key, limit = self._key("outcome"), time.monotonic() + _OUTCOME_S
        while not self._end.is_set() and time.monotonic() < limit:
            if self._called(store.check, [key]):
                outcome = msgspec.json.decode(self._called(store.get, key), type=_Outcome)
                if outcome.reported:
                    self._waits.note_told(time.monotonic())
                if outcome.text and answers and 0 in self._devices:
                    self._tell(outcome.step, outcome.text)
                break
            self._end.wait(_PAUSE_S)
        # Check immediately: the next question, for stacks, may be there already.
        self._number, self._polled_s = self._number + 1, 0.0


def _opened(rank: int, pid: int, table: int, stacks: int, *, size: int) -> HostDevice:
    """Open the device of another process on this host.

    Raises:
        OSError: its memory cannot be opened, or is something else.
    """
    found = []
    for descriptor, label in ((table, TABLE_LABEL), (stacks, STACKS_LABEL)):
        path = f"/proc/{pid}/fd/{descriptor}"
        if not os.readlink(path).startswith(f"/memfd:{label} "):
            raise FileNotFoundError(path)
        found.append(os.open(path, os.O_RDONLY | os.O_CLOEXEC))
    if os.fstat(found[0]).st_size != Progress.nbytes(size):
        raise FileNotFoundError(path)
    progress = Progress(found[0], size, mmap.ACCESS_READ)
    os.close(found[0])  # stays mapped
    return HostDevice(rank, pid, progress, found[1])
