"""The folder through which a launcher and its workers speak: reports, logs, progress."""

from __future__ import annotations

import json
import mmap
import os
import struct
import time
from dataclasses import asdict, dataclass
from pathlib import Path

__all__ = ["STOPPED_CODE", "Progress", "Report", "RunDirectory"]

STOPPED_CODE = 75
"""Exit code of a run that was asked to stop, has saved itself, and can go on (EX_TEMPFAIL)."""

_ROW = struct.Struct("<qq")


@dataclass(frozen=True, slots=True, kw_only=True)
class Report:
    """How a worker failed, in its own words."""

    rank: int
    """Number of the device."""
    step: int
    """What it was at; -1 before the first step."""
    time_s: float
    """When, in seconds since the epoch."""
    kind: str
    """Type of the exception."""
    text: str
    """Its message."""
    traceback: str
    """As Python prints it."""
    caused_by_peer: bool
    """It failed because another device did."""


class Progress:
    """A small table: every worker writes its step there, and the launcher whether to stop.

    Args:
        path: of the table's file, made by the launcher.
        devices: number of rows.
    """

    def __init__(self, path: Path, devices: int) -> None:
        with path.open("r+b") as file:
            self._table = mmap.mmap(file.fileno(), _ROW.size * (devices + 1))
        self._launcher = devices * _ROW.size

    def set_step(self, rank: int, step: int) -> None:
        """Note that ``rank`` has begun ``step``."""
        _ROW.pack_into(self._table, rank * _ROW.size, 1, step)

    def step_of(self, rank: int) -> int:
        """The step that ``rank`` is at, -1 before the first."""
        begun, step = _ROW.unpack_from(self._table, rank * _ROW.size)
        return int(step) if begun else -1

    def request_stop(self) -> None:
        """Ask the run to save itself and stop at the end of its step."""
        _ROW.pack_into(self._table, self._launcher, 1, 0)

    def stop_requested(self) -> bool:
        """Whether `request_stop` was called."""
        return bool(_ROW.unpack_from(self._table, self._launcher)[0])


@dataclass(frozen=True, slots=True)
class RunDirectory:
    """Paths of one run; the launcher makes the folder."""

    path: Path
    devices: int

    def clear_logs(self) -> None:
        """Remove the logs of an earlier run."""
        for path in self.path.glob("device-*.log"):
            path.unlink()

    def create(self) -> None:
        """Make the files of an attempt, and remove those of one before, but for its logs."""
        for path in self.path.glob("report-*.json"):
            path.unlink()  # of an attempt before this one
        (self.path / "port").unlink(missing_ok=True)
        (self.path / "progress").write_bytes(bytes(_ROW.size * (self.devices + 1)))

    def progress(self) -> Progress:
        """The table of steps."""
        return Progress(self.path / "progress", self.devices)

    def log(self, rank: int) -> Path:
        """Where the output of a device that is not the lead goes."""
        return self.path / f"device-{rank}.log"

    def log_sizes(self) -> int:
        """Bytes of all logs."""
        return sum(path.stat().st_size for path in self.path.glob("device-*.log"))

    def write_report(self, report: Report) -> None:
        """Leave word of a failure."""
        _write_whole(self._report(report.rank), json.dumps(asdict(report)))

    def read_report(self, rank: int) -> Report | None:
        """Word of a failure, if the worker left any."""
        path = self._report(rank)
        return Report(**json.loads(path.read_text())) if path.exists() else None

    def _report(self, rank: int) -> Path:
        return self.path / f"report-{rank}.json"

    def write_port(self, port: int) -> None:
        """Tell the other workers where the lead's store listens."""
        _write_whole(self.path / "port", str(port))

    def read_port(self, timeout_s: float) -> int:
        """Wait for `write_port`.

        Raises:
            TimeoutError: it did not come.
        """
        path = self.path / "port"
        limit = time.monotonic() + timeout_s
        while not path.exists():
            if time.monotonic() > limit:
                raise TimeoutError(f"device 0 did not open its store within {timeout_s:g} s")
            time.sleep(0.005)
        return int(path.read_text())


def _write_whole(path: Path, text: str) -> None:
    aside = path.with_name(path.name + ".part")
    aside.write_text(text)
    os.replace(aside, path)
