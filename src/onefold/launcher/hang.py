"""Detects devices that hang, and reports which devices wait for which and what each of them does.

`Waits` samples the devices of one host, `late_of` decides which of them hang, and `report_of`
formats the report. onefold's launcher uses these through `HangWatch`. Processes of other launchers,
which may run on several hosts, watch themselves: see `onefold.tools.host_watch`. This module does
not load PyTorch.

Note: when a wait is a hang
---------------------------
A device hangs if no device that it may be waiting for makes progress within a limit. Progress means
starting a step, a shard, a batch or another trainer call. Inside a step the limit is 10 seconds, or
three median steps if that is longer. Before the median is known, in an evaluation, or in the
script, a device may legitimately take longer, for example to compile. Then a device that uses the
CPU has a minute; before the first steps, so has a device that does not answer.

Note: where the stacks come from
--------------------------------
Each device writes its Python stacks into memory when it receives a real-time signal. The handler is
written in C, so it also runs while the interpreter waits for a lock or inside a library. Forked
loader workers inherit the handler and the memory. A process without the handler gets no signal,
because the signal would end it. For such a process, and for one that is blocked in the kernel, the
report gives the state that the kernel shows.
"""

from __future__ import annotations

import faulthandler
import logging
import math
import os
import re
import signal
import time
from collections import defaultdict, deque
from collections.abc import Iterable, Iterator, Sequence
from contextlib import suppress
from pathlib import Path
from statistics import median
from typing import NamedTuple

import msgspec

from onefold.core.call_digest import Call
from onefold.exchange.progress import DevicePlace, Progress
from onefold.system.words import listed, tell

__all__ = [
    "AGAIN_S",
    "STACKS_LABEL",
    "DeviceReport",
    "HangWatch",
    "HostDevice",
    "Waits",
    "answer_with_stacks",
    "late_of",
    "record_hang",
    "report_of",
]

_log = logging.getLogger("onefold")
_ASK_S, AGAIN_S = 8.0, 2.0
"""Seconds that a device waits before the first check, and between later checks."""
_LEAST_S, _BUSY_S, _STEPS = 10.0, 60.0, 3
"""Limits of a hang: see the note above."""
_BETWEEN_S = 60.0
"""Minimum time between two reports."""
_SAMPLE_S, _BUSY = 5.0, 0.1
"""Seconds without progress before CPU time is measured, and the CPU share that counts as busy."""
_MOST_LINES, _LONGEST_LINE = 200, 300


class HostDevice(NamedTuple):
    """A device of this host, as its watchers see it."""

    rank: int
    pid: int
    progress: Progress
    """Table that holds its place."""
    stacks: int
    """Descriptor of the memory to which its process writes stacks."""


class DeviceReport(msgspec.Struct, frozen=True, array_like=True):
    """State of a device, as sent between hosts."""

    rank: int
    pid: int
    host: str
    """Name of its host; empty if all devices are on one host."""
    place: DevicePlace
    still_s: float
    """Seconds since it last made progress."""
    busy: bool
    """Whether it uses the CPU in the meantime."""
    stacks: tuple[str, ...] = ()
    """Stack lines for the report."""


class _Seen(NamedTuple):
    """Place of a device, when it was first seen there, and a later sample of its CPU time."""

    place: DevicePlace
    since_s: float
    sampled_s: float = 0.0
    processor_s: float = -1.0


class Waits:
    """State of this host's devices, sampled at regular intervals."""

    def __init__(self) -> None:
        self._seen: dict[int, _Seen] = {}
        self._steps: deque[float] = deque(maxlen=101)
        self._last: tuple[int, float] | None = None
        self._has_first = False
        self._told: set[tuple[int, int]] = set()
        self._told_s = -math.inf

    @property
    def usual_s(self) -> float:
        """Seconds of the median step; 0 while unknown."""
        return median(self._steps) if self._steps else 0.0

    def update(self, devices: Sequence[HostDevice], now_s: float) -> None:
        """Sample the place of each device."""
        for device in devices:
            place, seen = device.progress.place_of(device.rank), self._seen.get(device.rank)
            if seen is None or seen.place != place:
                self._seen[device.rank] = _Seen(place, now_s)
            elif seen.processor_s < 0 and not place.waits and now_s - seen.since_s > _SAMPLE_S:
                used_s = _processor_s(device.pid)
                self._seen[device.rank] = seen._replace(sampled_s=now_s, processor_s=used_s)
        if devices:
            self._note_step(self._seen[devices[0].rank].place.step, now_s)

    def _note_step(self, step: int, now_s: float) -> None:
        # Neither the time before the first step nor the first step itself is typical.
        if self._last is None or self._last[0] < 1 or step < self._last[0]:
            self._last = step, now_s
        elif step > self._last[0]:
            several = step - self._last[0]
            if self._has_first or several > 1:
                self._steps.append((now_s - self._last[1]) / several)
            self._last, self._has_first = (step, now_s), True

    def has_question(self, now_s: float, own: int | None = None) -> bool:
        """Whether a device (``own``, if given) has waited long enough to start a hang check."""
        return now_s - self._told_s > _BETWEEN_S and any(
            now_s - seen.since_s > _ASK_S and (rank, seen.place.wait) not in self._told
            for rank, seen in list(self._seen.items())
            if seen.place.waits and own in (None, rank)
        )

    def still_s(self, rank: int, now_s: float) -> float:
        """Seconds since a device last made progress."""
        return now_s - self._seen[rank].since_s if rank in self._seen else 0.0

    def standings(
        self, devices: Sequence[HostDevice], now_s: float, *, host: str = "", stacks: bool = False
    ) -> list[DeviceReport]:
        """Return the state of the devices at the last sample."""
        return [
            DeviceReport(
                device.rank,
                device.pid,
                host,
                seen.place,
                now_s - seen.since_s,
                _is_busy(device, seen, now_s),
                tuple(_cut(_stacks_of(device.pid, device.stacks))) if stacks else (),
            )
            for device in devices
            if (seen := self._seen.get(device.rank)) is not None
        ]

    def untold(self, late: Iterable[DeviceReport], now_s: float) -> bool:
        """Return whether one of these waits is unreported; if so, mark all as reported."""
        if {(each.rank, each.place.wait) for each in late} <= self._told:
            return False
        self.note_told(now_s)
        return True

    def note_told(self, now_s: float) -> None:
        """Mark the current waits of this host's devices as reported."""
        self._told = {(rank, seen.place.wait) for rank, seen in list(self._seen.items())}
        self._told_s = now_s


def _is_busy(device: HostDevice, seen: _Seen, now_s: float) -> bool:
    if seen.place.waits:
        return False
    if seen.processor_s < 0 or now_s - seen.sampled_s < 1.0:
        return True  # not yet known
    return _processor_s(device.pid) - seen.processor_s > _BUSY * (now_s - seen.sampled_s)


def _cut(lines: Iterable[str]) -> list[str]:
    """Limit the number and length of lines: a process may have hundreds of children."""
    return [line[:_LONGEST_LINE] for line in lines][:_MOST_LINES]


def late_of(standings: Sequence[DeviceReport], usual_s: float, size: int) -> list[DeviceReport]:
    """Return the devices that hang; see the note above.

    Args:
        standings: states of all devices that answer.
        usual_s: seconds of the median step; 0 while unknown.
        size: number of devices.
    """
    movers = [each for each in standings if not each.place.waits]
    limit_s = max((_limit_s(each, usual_s) for each in movers), default=0.0)
    limit_s = max(limit_s, _LEAST_S, _STEPS * usual_s)
    if len(standings) < size and not usual_s:
        limit_s = max(limit_s, _BUSY_S)
    still_s = min((each.still_s for each in movers), default=math.inf)
    waiting = (each for each in standings if each.place.waits)
    return [each for each in waiting if min(each.still_s, still_s) > limit_s]


def _limit_s(mover: DeviceReport, usual_s: float) -> float:
    in_step = usual_s > 0 and mover.place.call in (Call.STEP, Call.GRADIENT)
    return 0.0 if in_step or not mover.busy else _BUSY_S


def report_of(standings: Sequence[DeviceReport], size: int) -> str:
    """Format the report.

    Args:
        standings: states of all devices that answer, with stacks; some of them hang.
        size: number of devices.
    """
    return "\n".join(_words(standings, size))


def _words(standings: Sequence[DeviceReport], size: int) -> Iterator[str]:
    silent = sorted(set(range(size)) - {each.rank for each in standings})
    movers = sorted([each.rank for each in standings if not each.place.waits] + silent)
    # One line for all devices that wait for the same devices in the same step.
    groups: dict[tuple[str, int], list[DeviceReport]] = {}
    for each in (each for each in standings if each.place.waits):
        peers = [each.place.peer] if each.place.peer >= 0 else movers
        whom = _named(peers) if peers else "the others"
        groups.setdefault((whom, each.place.step), []).append(each)
    for (whom, step), waiting in groups.items():
        who, verb = _named([each.rank for each in waiting]), "have" if len(waiting) > 1 else "has"
        waited_s = max(each.still_s for each in waiting)
        yield f"{who} {verb} waited for {waited_s:.0f} s for {whom}, in step {max(0, step)}"
    if silent:
        yield f"no answer from {_named(silent)}: suspended, or on a host that cannot be reached"
    # Devices that do not wait come first: one of them is probably the cause.
    for each in sorted(standings, key=lambda each: (each.place.waits, each.rank)):
        on = f" on {each.host}" if each.host else ""
        yield f"device {each.rank} (process {each.pid}{on}) {_place_words(each.place)}:"
        yield from each.stacks


def _named(ranks: Sequence[int]) -> str:
    return f"device{'s' * (len(ranks) > 1)} {listed(map(str, ranks), most=8)}"


def _place_words(place: DevicePlace) -> str:
    where = f"in step {place.step}" if place.step >= 0 else "before the first step"
    calls = set(Call) if place.call else ()
    at = Call(place.call).words if place.call in calls else ""
    inside = f"{where}, at {at}" if at and place.call != Call.STEP else where
    if place.waits:
        return f"waits for others {inside}"
    if place.shard >= 0:
        return f"computes shard {place.shard} {inside}"
    if place.reads:
        return f"waits for its loader {inside}"
    return f"is at {at} {where}" if at else f"is in the script {where}"


class HangWatch:
    """Reports devices that hang. The launcher calls `report_hangs` repeatedly.

    Args:
        record: path of the run's record; the file may not exist.
    """

    def __init__(self, record: Path | None) -> None:
        self._record, self._waits, self._next_s = record, Waits(), 0.0

    def report_hangs(self, devices: Sequence[HostDevice]) -> None:
        """Report each device that hangs, once per wait."""
        try:
            self._find_hangs(devices, time.monotonic())
        except Exception:
            # A failed report must not end the run.
            _log.warning("a device may hang, but the report of it failed", exc_info=True)

    def _find_hangs(self, devices: Sequence[HostDevice], now_s: float) -> None:
        self._waits.update(devices, now_s)
        if now_s < self._next_s or not self._waits.has_question(now_s):
            return
        self._next_s = now_s + AGAIN_S
        standings = self._waits.standings(devices, now_s)
        late = late_of(standings, self._waits.usual_s, len(devices))
        if self._waits.untold(late, now_s):
            standings = self._waits.standings(devices, now_s, stacks=True)
            text = report_of(standings, len(devices))
            tell(text)
            record_hang(self._record, late[0].place.step, text)


def record_hang(record: Path | None, step: int, text: str) -> None:
    """Append a report to the record, if there is one: its writer may be the device that hangs."""
    if record is None or not record.is_file():
        return
    # Import late, because these modules load PyTorch.
    from onefold.record.entries import HangEntry, append_beside, encode

    with suppress(OSError):
        append_beside(record, encode(HangEntry(step=step, text=text)))


STACKS_LABEL = "onefold-stacks"
"""Name of the stack memory in ``/proc``."""
_STACKS = signal.SIGRTMIN + 3
_ANSWER_S, _ALL_ANSWER_S = 2.0, 6.0
"""Seconds to wait for the stacks of one process, and for those of a device with its children."""
_MOST_FRAMES, _INNERMOST, _MOST_THREADS = 12, 3, 4
_STATES = {
    "D": "it is blocked in the kernel, by a disk or a device",
    "T": "it is suspended",
    "Z": "it has ended",
}
_FRAME = re.compile(r'  File "(.*)", line (\d+) in (.*)')
_LIBRARIES = ("<frozen ", os.path.dirname(os.__file__), str(Path(__file__).parents[1]))
_INSTALLED = {"site-packages", "dist-packages"}
_TICKS = os.sysconf("SC_CLK_TCK")


def answer_with_stacks(descriptor: int) -> None:
    """Make this process, and its forked children, write their stacks on request."""
    # Keep a handler that the script set; a process without faulthandler's is never signaled.
    if signal.getsignal(_STACKS) == signal.SIG_DFL:
        faulthandler.register(_STACKS, file=descriptor, all_threads=True)


def _stacks_of(pid: int, descriptor: int) -> Iterator[str]:
    """Yield lines with the stacks of a process and of its descendants.

    Args:
        pid: id of the process.
        descriptor: memory that the process passed to `answer_with_stacks`.
    """
    limit = time.monotonic() + _ALL_ANSWER_S
    for each in [pid, *_descendants_of(pid)]:
        if each != pid:
            yield f"  its process {each} ({_command_of(each)}):"
        before = os.fstat(descriptor).st_size
        text = _asked(each, descriptor, before) if time.monotonic() < limit else ""
        yield from _shown(text) if text else [f"    no stack: {_state_of(each)}"]


def _processor_s(pid: int) -> float:
    """Return the CPU time, in seconds, of a process and its descendants."""
    # utime and stime, then cutime and cstime of children that have ended.
    fields = filter(None, map(_stat_of, [pid, *_descendants_of(pid)]))
    return sum(sum(map(int, each[11:15])) for each in fields) / _TICKS


def _asked(pid: int, descriptor: int, before: int) -> str:
    """Request the stacks of a process and wait for them; empty if it does not answer."""
    with suppress(OSError):
        caught = re.search(r"^SigCgt:\s*([0-9a-f]+)", _text(f"/proc/{pid}/status"), re.M)
        if caught is None or not int(caught[1], 16) >> (_STACKS - 1) & 1:
            return ""
        os.kill(pid, _STACKS)
        limit, size = time.monotonic() + _ANSWER_S, before
        while time.monotonic() < limit:
            time.sleep(0.05)
            now = os.fstat(descriptor).st_size
            if now > before and now == size:
                break
            size = now
        return os.pread(descriptor, size - before, before).decode(errors="replace")
    return ""


def _shown(text: str) -> Iterator[str]:
    """Yield the calls of a process's stacks, outermost first: the script's and the innermost."""
    threads = re.split(r"^(?:Current thread|Thread) .*\n", text, flags=re.M)[1:]
    found = [_FRAME.findall(each) for each in threads]
    # Skip threads of a tracker or of Ray, which call only code of installed packages.
    own = [frames for frames in found if any(_is_own(file) for file, _, _ in frames)]
    for number, frames in enumerate((own or found)[:_MOST_THREADS]):
        if number:
            yield "    another thread:"
        kept = [
            frame for place, frame in enumerate(frames)
            if place < _INNERMOST or not _is_library(frame[0])
        ]  # fmt: skip
        for file, line, name in reversed(kept[:_MOST_FRAMES]):
            yield f"    {file}:{line} in {name}"


def _is_library(file: str) -> bool:
    return file.startswith(_LIBRARIES) or f"{os.sep}torch{os.sep}" in file


def _is_own(file: str) -> bool:
    return not _is_library(file) and not {*Path(file).parts} & _INSTALLED


def _descendants_of(pid: int) -> list[int]:
    """Return the ids of a process's descendants, such as loader workers."""
    children = defaultdict[int, list[int]](list)
    for path in Path("/proc").glob("[0-9]*"):
        if fields := _stat_of(path.name):
            children[int(fields[1])].append(int(path.name))
    found = [pid]
    for each in found:
        found += sorted(children[each])
    return found[1:]


def _stat_of(pid: int | str) -> list[str]:
    """Return the fields of ``/proc/PID/stat`` from the state on; none if the process has ended."""
    with suppress(OSError):
        return _text(f"/proc/{pid}/stat").rpartition(")")[2].split()
    return []


def _command_of(pid: int) -> str:
    with suppress(OSError):
        return _text(f"/proc/{pid}/comm").strip()
    return "ended"


def _state_of(pid: int) -> str:
    with suppress(OSError):
        where = _text(f"/proc/{pid}/wchan").strip("0\n")
        if fields := _stat_of(pid):
            words = _STATES.get(fields[0], "it does not answer")
            return f"{words} ({where})" if where else words
    return "it has ended"


def _text(path: str) -> str:
    # A process name may contain bytes that are not text.
    return Path(path).read_text(errors="replace")
