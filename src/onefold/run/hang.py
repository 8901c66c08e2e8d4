"""Says once who waits for whom, and what every process does, when a device waits for long.

Note: where the stacks come from
--------------------------------
Each worker has its Python stacks written into memory of the launcher when a real-time signal comes:
by a handler in C, so also where the interpreter waits for a lock or inside of a library. Loader
workers that were forked have the same handler and the same memory. A process without the handler is
sent nothing, as the signal would end it: of that one, and of one that waits inside of the system,
the kernel's word for its state is told.
"""

from __future__ import annotations

import faulthandler
import logging
import math
import os
import re
import signal
import time
from collections import deque
from collections.abc import Iterator, Sequence
from contextlib import suppress
from pathlib import Path
from statistics import median
from typing import NamedTuple, Protocol

from onefold.exchange.progress import Progress
from onefold.run.rundir import RunStatus
from onefold.system.words import tell

__all__ = ["HangWatch", "answer_with_stacks"]

_log = logging.getLogger("onefold")
_STACKS = signal.SIGRTMIN + 3
_LEAST_S, _STEPS = 10.0, 3
"""How long a device has waited before it is told: so long, or so many steps as the median one."""
_BETWEEN_S = 60.0
_ANSWER_S, _ALL_ANSWER_S = 3.0, 10.0
"""How long is waited for the stacks of a process, and for those of a worker and its children."""
_MOST_FRAMES, _INNERMOST, _MOST_THREADS = 12, 3, 4
_STATES = {
    "D": "it waits inside of the system, for a disk or a device",
    "T": "it is stopped",
    "Z": "it has ended",
}
_FRAME = re.compile(r'  File "(.*)", line (\d+) in (.*)')
_LIBRARIES = ("<", os.path.dirname(os.__file__), str(Path(__file__).parents[1]))


def answer_with_stacks(descriptor: int) -> None:
    """Have this process, and what it forks, write its stacks there whenever the launcher asks."""
    faulthandler.register(_STACKS, file=descriptor, all_threads=True)


class _Worker(Protocol):
    """A worker, as the launcher sees it."""

    rank: int
    pid: int

    @property
    def code(self) -> int | None: ...


class _Wait(NamedTuple):
    """A wait of a device, as the launcher has first seen it."""

    number: int
    since_s: float


class HangWatch:
    """Looks for a device that waits for too long; call `look` again and again.

    Args:
        status: the memory shared with the workers.
        record: where the record of the run is; it need not exist.
    """

    def __init__(self, status: RunStatus, record: Path | None) -> None:
        self._status, self._record = status, record
        self._waits: dict[int, _Wait] = {}
        self._steps: deque[float] = deque(maxlen=101)
        self._last: tuple[int, float] | None = None
        self._told: set[tuple[int, int]] = set()
        self._told_s = -math.inf

    def look(self, workers: Sequence[_Worker]) -> None:
        """Tell of each device that has waited for too long, once for each wait."""
        try:
            self._look([worker for worker in workers if worker.code is None], time.monotonic())
        except Exception:
            # A report must not end the run that it is about.
            _log.warning("a device waits for long, and the report failed", exc_info=True)

    def _look(self, workers: Sequence[_Worker], now_s: float) -> None:
        progress = self._status.progress
        self._note_step(progress.step_of(0), now_s)
        for worker in workers:
            number = progress.wait_of(worker.rank)
            known = self._waits.get(worker.rank)
            if known is None or known.number != number:
                self._waits[worker.rank] = _Wait(number, now_s)
        usual_s = median(self._steps) if self._steps else 0.0
        late = [
            worker
            for worker in workers
            if self._waits[worker.rank].number % 2
            and now_s - self._waits[worker.rank].since_s > max(_LEAST_S, _STEPS * usual_s)
        ]
        waits = {(worker.rank, self._waits[worker.rank].number) for worker in late}
        if waits - self._told and now_s - self._told_s > _BETWEEN_S:
            self._told |= waits
            self._told_s = now_s
            text = "\n".join(self._words(late, workers, now_s))
            tell(text)
            self._write(progress.step_of(late[0].rank), text)

    def _note_step(self, step: int, now_s: float) -> None:
        # What comes before the first step is no step.
        if self._last is None or self._last[0] < 1 or step < self._last[0]:
            self._last = step, now_s
        elif step > self._last[0]:
            self._steps.append((now_s - self._last[1]) / (step - self._last[0]))
            self._last = step, now_s

    def _words(
        self, late: Sequence[_Worker], workers: Sequence[_Worker], now_s: float
    ) -> Iterator[str]:
        progress = self._status.progress
        for worker in late:
            waited_s = now_s - self._waits[worker.rank].since_s
            peer = progress.waits_for(worker.rank)
            others = [f"device {peer}"] if peer >= 0 else [
                f"device {each.rank}" for each in workers
                if each.rank != worker.rank and not progress.wait_of(each.rank) % 2
            ] or ["the others"]  # fmt: skip
            yield (
                f"device {worker.rank} has waited for {waited_s:.0f} s for {', '.join(others)}, in "
                f"step {max(0, progress.step_of(worker.rank))}"
            )
        # Those that nobody else keeps waiting come first.
        for worker in sorted(workers, key=lambda each: progress.wait_of(each.rank) % 2):
            yield f"device {worker.rank} (process {worker.pid}) {_place_of(progress, worker.rank)}:"
            yield from self._stacks(worker)

    def _stacks(self, worker: _Worker) -> Iterator[str]:
        descriptor, limit = self._status.stacks[worker.rank], time.monotonic() + _ALL_ANSWER_S
        for pid in [worker.pid, *_children_of(worker.pid)]:
            if pid != worker.pid:
                yield f"  its process {pid} ({_command_of(pid)}):"
            before = os.fstat(descriptor).st_size
            text = _asked(pid, descriptor, before) if time.monotonic() < limit else ""
            yield from _shown(text) if text else [f"    no stack: {_state_of(pid)}"]

    def _write(self, step: int, text: str) -> None:
        """Append what was told to the record; its writer may be the one that hangs."""
        if self._record is None or not self._record.is_file():
            return
        # Only now: these load PyTorch.
        from onefold.record.entries import Hang, encode
        from onefold.record.frames import append_beside

        with suppress(OSError):
            append_beside(self._record, encode(Hang(step=step, text=text)))


def _place_of(progress: Progress, rank: int) -> str:
    step, shard = progress.step_of(rank), progress.shard_of(rank)
    where = f"in step {step}" if step >= 0 else "before the first step"
    if progress.wait_of(rank) % 2:
        return f"waits for others {where}"
    return f"computes shard {shard} {where}" if shard >= 0 else f"is in the script {where}"


def _asked(pid: int, descriptor: int, before: int) -> str:
    """Ask a process for its stacks, and wait for its answer; empty where there is none."""
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
    """The stacks of a process, outermost call first: the script's calls, and the innermost ones."""
    threads = re.split(r"^(?:Current thread|Thread) .*\n", text, flags=re.M)[1:]
    found = [_FRAME.findall(each) for each in threads]
    own = [frames for frames in found if not all(_is_library(file) for file, _, _ in frames)]
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


def _children_of(pid: int) -> list[int]:
    """The other processes of a worker's group, such as those of loaders."""
    found = []
    for path in Path("/proc").glob("[0-9]*/stat"):
        with suppress(OSError, ValueError):
            fields = _text(path).rpartition(")")[2].split()
            if int(fields[2]) == pid and path.parent.name != str(pid):
                found.append(int(path.parent.name))
    return sorted(found)


def _command_of(pid: int) -> str:
    with suppress(OSError):
        return _text(f"/proc/{pid}/comm").strip()
    return "ended"


def _state_of(pid: int) -> str:
    with suppress(OSError):
        state = _text(f"/proc/{pid}/stat").rpartition(")")[2].split()[0]
        where = _text(f"/proc/{pid}/wchan").strip("0\n")
        words = _STATES.get(state, "it does not answer")
        return f"{words} ({where})" if where else words
    return "it has ended"


def _text(path: Path | str) -> str:
    # A process may bear a name that is no text.
    return Path(path).read_text(errors="replace")
