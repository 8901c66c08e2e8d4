"""What the processes of a device do: their Python stacks, or what the kernel says of them.

Does not load PyTorch.

Note: where the stacks come from
--------------------------------
Each device has its Python stacks written into memory of its own when a real-time signal comes: by a
handler in C, so also where the interpreter waits for a lock or inside of a library. Loader workers
that were forked have the same handler and the same memory. A process without the handler is sent
nothing, as the signal would end it: of that one, and of one that waits inside of the system, the
kernel's word for its state is reported.
"""

from __future__ import annotations

import faulthandler
import os
import re
import signal
import time
from collections import defaultdict
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

__all__ = ["STACKS_LABEL", "answer_with_stacks", "processor_s", "stacks_of"]

STACKS_LABEL = "onefold-stacks"
"""What ``/proc`` calls the memory for stacks."""
_STACKS = signal.SIGRTMIN + 3
_ANSWER_S, _ALL_ANSWER_S = 2.0, 6.0
"""How long is waited for the stacks of a process, and for those of a device and its children."""
_MOST_FRAMES, _INNERMOST, _MOST_THREADS = 12, 3, 4
_STATES = {
    "D": "it waits inside of the system, for a disk or a device",
    "T": "it is stopped",
    "Z": "it has ended",
}
_FRAME = re.compile(r'  File "(.*)", line (\d+) in (.*)')
_LIBRARIES = ("<frozen ", os.path.dirname(os.__file__), str(Path(__file__).parents[1]))
_INSTALLED = ("site-packages", "dist-packages")
_TICKS = os.sysconf("SC_CLK_TCK")


def answer_with_stacks(descriptor: int) -> None:
    """Have this process, and what it forks, write its stacks there whenever it is asked to."""
    # A handler of the script's own stays: nobody asks a process that would not answer in this way.
    if signal.getsignal(_STACKS) == signal.SIG_DFL:
        faulthandler.register(_STACKS, file=descriptor, all_threads=True)


def stacks_of(pid: int, descriptor: int) -> Iterator[str]:
    """Lines with the stacks of a process and of those that it has started.

    Args:
        pid: id of the process.
        descriptor: the memory that it has given to `answer_with_stacks`.
    """
    limit = time.monotonic() + _ALL_ANSWER_S
    for each in [pid, *_descendants_of(pid)]:
        if each != pid:
            yield f"  its process {each} ({_command_of(each)}):"
        before = os.fstat(descriptor).st_size
        text = _asked(each, descriptor, before) if time.monotonic() < limit else ""
        yield from _shown(text) if text else [f"    no stack: {_state_of(each)}"]


def processor_s(pid: int) -> float:
    """The processor time, in seconds, that a process and those that it has started have used."""
    # utime and stime, and of children that have ended cutime and cstime.
    fields = filter(None, map(_stat_of, [pid, *_descendants_of(pid)]))
    return sum(sum(map(int, each[11:15])) for each in fields) / _TICKS


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
    # Not threads of a tracker or of Ray, whose calls are those of an installed package alone.
    own = [frames for frames in found if not all(_is_installed(file) for file, _, _ in frames)]
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


def _is_installed(file: str) -> bool:
    return _is_library(file) or any(each in Path(file).parts for each in _INSTALLED)


def _descendants_of(pid: int) -> list[int]:
    """The processes that a process has started, such as those of loaders, and theirs."""
    children = defaultdict[int, list[int]](list)
    for path in Path("/proc").glob("[0-9]*"):
        if fields := _stat_of(path.name):
            children[int(fields[1])].append(int(path.name))
    found = [pid]
    for each in found:
        found += sorted(children[each])
    return found[1:]


def _stat_of(pid: int | str) -> list[str]:
    """The fields of ``/proc/PID/stat`` from the state on; none of a process that has ended."""
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
    # A process may bear a name that is no text.
    return Path(path).read_text(errors="replace")
