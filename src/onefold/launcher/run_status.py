"""What a launcher and its workers share: their status, logs, and the store of a process group.

Note: nothing has a name
------------------------
Progress, reports and the store lie in memory that the workers inherit as open descriptors. It has
no name, so nobody else can write there, no cleaner of temporary files can remove it, and nothing
stays behind however a process ends.
"""

from __future__ import annotations

import json
import os
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

from onefold.exchange.progress import Progress
from onefold.system.safe_files import PrivateFolder, create_file, memory_file, write_all
from onefold.system.words import tell

__all__ = ["Logs", "RunStatus", "WorkerReport", "write_report"]


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkerReport:
    """How a worker ended, in its own words."""

    time_s: float = 0.0
    """When it failed, in seconds since 1970."""
    kind: str = ""
    """Type of the exception; empty if it has not failed."""
    text: str = ""
    """The message of the exception."""
    traceback: str = ""
    """As Python prints it."""
    caused_by_peer: bool = False
    """Whether it failed because another device did."""
    threads: str = ""
    """The threads that it waits for, once its script has ended well."""


class RunStatus:
    """The status of one attempt of a run, in memory that the launcher shares with its workers.

    Args:
        devices: number of workers.
    """

    def __init__(self, devices: int) -> None:
        # Closed on exec as Python opens them; the workers get theirs by `pass_fds` alone.
        self.table = memory_file("onefold-progress")
        """Descriptor of the table of steps."""
        self.reports = [memory_file(f"onefold-report-{number}") for number in range(devices)]
        """Descriptor of each worker's report."""
        self.stacks = [memory_file(f"onefold-stacks-{number}") for number in range(devices)]
        """Descriptor of the memory in which each worker writes its stacks when it is asked."""
        self.store = memory_file()
        """Descriptor of the file through which the workers' process group is formed."""
        os.ftruncate(self.table, Progress.nbytes(devices))
        self.progress = Progress(self.table, devices)

    def report(self, rank: int) -> WorkerReport:
        """The worker's report if it left a whole one; else an empty one."""
        descriptor = self.reports[rank]
        text = os.pread(descriptor, os.fstat(descriptor).st_size, 0)
        return WorkerReport(**json.loads(text)) if text.endswith(b"\n") else WorkerReport()

    def close(self) -> None:
        """Close the descriptors; the memory goes with the last process that has it."""
        for descriptor in (self.table, self.store, *self.reports, *self.stacks):
            os.close(descriptor)


def write_report(descriptor: int, report: WorkerReport) -> None:
    """Write a worker's report, in place of an earlier one."""
    os.ftruncate(descriptor, 0)
    os.lseek(descriptor, 0, os.SEEK_SET)
    # The process may be killed at any moment: only what has its line's end is whole.
    write_all(descriptor, json.dumps(asdict(report)).encode() + b"\n")


class Logs:
    """Files for the output of some devices of one run.

    They are called ``device-1.log`` and so on. If one of these names is taken, by an earlier run or
    anything else, all of them are called ``device-1.run-2.log`` and so on, with the first number
    that is free.

    Args:
        folder: where they lie, made if it does not exist; empty for a private folder, which stays
            if `place` has named it.
        ranks: numbers of the devices that have a log.
    """

    def __init__(self, folder: str, ranks: Sequence[int]) -> None:
        self._private = None if folder else PrivateFolder()
        self._folder = Path(folder) if self._private is None else self._private.path
        self._folder.mkdir(parents=True, exist_ok=True)
        self.descriptors: dict[int, int] = {}
        """Those of the logs, by device."""
        self._number = 1
        while not self._make(ranks):
            self._number += 1
        self._is_named = False
        if ranks and self._number > 1:
            tell(f"{folder} has logs already: those of this run are {self._path('*')}")

    def _make(self, ranks: Sequence[int]) -> bool:
        """Make the logs, unless one of the names is taken; return whether they are made."""
        try:
            for rank in ranks:
                self.descriptors[rank] = create_file(self._path(rank), append=True)
        # Made only where there was nothing, so that two runs at once never share a file: whoever
        # comes second takes back what it made, and tries the next number.
        except FileExistsError:
            while self.descriptors:
                rank, descriptor = self.descriptors.popitem()
                os.close(descriptor)
                self._path(rank).unlink(missing_ok=True)
            return False
        return True

    def _path(self, rank: int | str) -> Path:
        run = "" if self._number == 1 else f".run-{self._number}"
        return self._folder / f"device-{rank}{run}.log"

    def place(self, *, failed: bool) -> str:
        """Where the logs are, for a user who is to read them; empty if nothing is worth reading."""
        if self._private is None:
            useful = bool(self.descriptors)
        else:
            sizes = (os.fstat(descriptor).st_size for descriptor in self.descriptors.values())
            useful = failed and any(sizes) and self._private.is_there()
        # A path that the user has read must last, so this decides that the folder is kept.
        self._is_named |= useful
        return str(self._folder if self._number == 1 else self._path("*")) if useful else ""

    def close(self) -> None:
        """Close the files, and remove a private folder that nobody was told of."""
        for descriptor in self.descriptors.values():
            os.close(descriptor)
        if self._private is not None:
            leave = self._private.keep if self._is_named else self._private.remove
            leave()
