"""The folder of a run: what it was asked for, how it went, what it made.

``config.toml`` holds all options, ``run.json`` what the run is and its best epoch, ``scan.json``
what was seen of the data's files, so that a run that goes on need not read them all again,
``metrics.jsonl`` one line every few steps and every epoch, ``tensorboard/`` the same as events,
``checkpoints/`` the last and the best state, ``examples.json`` and ``pictures/`` what the report
shows, ``report.html`` the report. Only the lead writes.
"""

from __future__ import annotations

import importlib.util
import json
import logging
import math
import os
import tempfile
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from onefold.errors import DataError, LaunchError, OnefoldError
from onefold.jobs.options import TrainOptions, write_config
from onefold.jobs.runlock import open_lock
from onefold.system.plainfile import open_plain, parse_json, read_plain, write_whole

__all__ = [
    "CHECKPOINTS",
    "CONFIG",
    "RUN",
    "SCAN",
    "RunFolder",
    "check_folder",
    "kept_facts",
    "next_name",
    "read_run",
    "require_room",
    "require_writable",
]

CHECKPOINTS = "checkpoints"
CONFIG = "config.toml"
RUN = "run.json"
SCAN = "scan.json"
LOCK = ".lock"
MOST_JSON_BYTES = 1 << 26
"""Of ``run.json``."""

_log = logging.getLogger("onefold")
_TRIED_BYTES = 4096
_LINE_BYTES = 1 << 20


def next_name(runs: Path, job: str) -> str:
    """The first name of a job and a number that no run has."""
    number = 1
    while (runs / f"{job}-{number}").exists():
        number += 1
    return f"{job}-{number}"


def check_folder(folder: Path, *, resume: bool) -> None:
    """Refuse to write over a run, or to go on with one that is not there.

    Raises:
        LaunchError: so it would be.
    """
    if not resume:
        check_folder_is_free(folder)
    begun = (folder / CONFIG).is_file()
    if not begun and folder.exists():
        raise LaunchError(f"{folder} is there, but holds no run: another --name begins one")
    if not begun and resume:
        raise LaunchError(f"--resume: there is no run in {folder}; leave --resume out to begin one")


def require_writable(folder: Path, otherwise: str) -> None:
    """Refuse a folder in which no file can be made, or that cannot be made itself.

    Args:
        folder: it need not be there yet.
        otherwise: what to do, for the error.

    Raises:
        LaunchError: it is one.
    """
    nearest = next(path for path in (folder, *folder.absolute().parents) if path.exists())
    try:
        with tempfile.TemporaryFile(dir=nearest) as file:
            file.write(bytes(_TRIED_BYTES))
    except OSError as error:
        raise LaunchError(
            f"{folder}: expected a folder that can be written to, got {error.strerror} in "
            f"{nearest}: {otherwise}"
        ) from error


def require_room(folder: Path) -> None:
    """Refuse to begin what could not be written, before anything takes time.

    Args:
        folder: of the run; it need not be there yet.

    Raises:
        LaunchError: no file can be made there, or another process is at work in it.
    """
    require_writable(folder, "--runs names another one")
    require_writable(folder / CHECKPOINTS, "mend it, or give this run another --name")
    try:
        lock = open_lock(folder / LOCK, make=False)
    except FileNotFoundError:
        return
    os.close(lock)


def check_folder_is_free(folder: Path) -> None:
    """Refuse to write over a run.

    Raises:
        LaunchError: there is one.
    """
    if (folder / CONFIG).is_file():
        raise LaunchError(
            f"{folder} is there already: --resume goes on with it, another --name begins a new run"
        )


def read_run(folder: Path, job: str | None = None) -> dict[str, Any]:
    """What a run's ``run.json`` says.

    Args:
        folder: of the run.
        job: whose run it must be.

    Raises:
        DataError: the folder is not that of a run, or of another job's, or the file is damaged.
    """
    path = folder / RUN
    try:
        said = parse_json(read_plain(path).decode())
    except (FileNotFoundError, NotADirectoryError):
        raise DataError(f"{folder}: expected the folder of a run, with run.json in it") from None
    except OSError as error:
        raise DataError(f"{path}: {error.strerror}") from error
    except ValueError as error:
        raise DataError(f"{path}: expected JSON: {error}") from error
    if not isinstance(said, dict):
        raise DataError(f"{path}: expected facts by name, got a {type(said).__name__}")
    if job is not None and said.get("job") != job:
        raise DataError(f"{folder}: expected a run of onefold train {job}, got {said.get('job')}")
    return said


@contextmanager
def kept_facts(folder: Path) -> Iterator[None]:
    """What is missing in ``run.json``, or of another kind, becomes one error that names it.

    Raises:
        DataError: something is.
    """
    try:
        yield
    except OnefoldError:
        raise
    except (AttributeError, LookupError, OSError, OverflowError, TypeError, ValueError) as error:
        raise DataError(
            f"{folder / RUN}: expected what the run has kept of its model, got {error!r}"
        ) from error


class RunFolder:
    """Writes a run's folder, on the lead; elsewhere it does nothing.

    Args:
        path: of the folder.
        is_lead: whether to write.
    """

    def __init__(self, path: Path, *, is_lead: bool) -> None:
        self.path = path
        self._is_lead = is_lead
        self._events: Any = None
        self._locked: int | None = None
        self._said: dict[str, Any] = {}

    def create(self, options: TrainOptions, job: str, files: Mapping[str, str]) -> None:
        """Make the folder, with the options and the files that belong to the model."""
        if not self._is_lead:
            return
        self.path.mkdir(parents=True, exist_ok=True)
        self._lock()
        check_folder_is_free(self.path)
        for name, content in files.items():
            write_whole(self.path / name, content.encode())
        self._write_config(options, job)

    def go_on(self, options: TrainOptions, job: str, *, steps: int, epochs: int) -> None:
        """Take back what came after the checkpoint from which the run goes on.

        Args:
            options: of now.
            job: of the run.
            steps: done at the checkpoint.
            epochs: done there, evaluation included.
        """
        if not self._is_lead:
            return
        self._lock()
        lines = [
            line
            for line in self.lines()
            if (line["epoch"] < epochs if line["kind"] == "epoch" else line["step"] <= steps)
        ]
        text = "".join(json.dumps(line) + "\n" for line in lines)
        write_whole(self._metrics, text.encode())
        if (self.path / RUN).is_file():  # or the run was stopped before it said anything
            self._said = read_run(self.path)
        self._write_config(options, job)

    def open_events(self, step: int) -> None:
        """Begin to write events for TensorBoard, if that is installed; later ones are dropped."""
        if self._is_lead and importlib.util.find_spec("tensorboard") is not None:
            from torch.utils.tensorboard import SummaryWriter

            self._events = SummaryWriter(str(self.path / "tensorboard"), purge_step=step)

    def _lock(self) -> None:
        """Keep other processes from this run while it lasts; a process that ends lets go of it."""
        self._locked = open_lock(self.path / LOCK, make=True)

    def close(self) -> None:
        """Bring all events to the disk, and let others go on with the run."""
        if self._locked is not None:
            os.close(self._locked)
            self._locked = None
        if self._events is not None:
            self._events.close()
            self._events = None

    def say(self, **facts: Any) -> None:
        """Note in ``run.json`` what is known now."""
        if self._is_lead:
            self._said.update(facts)
            write_whole(self.path / RUN, json.dumps(_finite(self._said), indent=1).encode())

    def add(self, line: dict[str, Any]) -> None:
        """Add a line to the metrics, and the same to the events."""
        if not self._is_lead:
            return
        flags = os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_NOFOLLOW | os.O_CLOEXEC
        with os.fdopen(os.open(self._metrics, flags, 0o666), "ab") as file:
            file.write(json.dumps(_finite(line)).encode() + b"\n")
        if self._events is not None:
            for name, value in _scalars(line):
                self._events.add_scalar(name, value, line["step"])

    def lines(self) -> list[dict[str, Any]]:
        """The metrics so far; what was cut off or damaged is left out, with a warning."""
        try:
            file = open_plain(self._metrics)
        except FileNotFoundError:
            return []
        found, damaged = [], 0
        with file:
            while line := file.readline(_LINE_BYTES):
                record = _read_line(line)
                if record is not None:
                    found.append(record)
                elif line.endswith(b"\n"):  # else the run was stopped while it wrote this
                    damaged += 1
        if damaged:
            _log.warning("%s: %d damaged lines were left out", self._metrics, damaged)
        return found

    def keep_scan(self, scan: str) -> None:
        """Note what was seen of the data's files."""
        if self._is_lead and scan:
            write_whole(self.path / SCAN, scan.encode())

    def write_examples(self, examples: dict[str, Any]) -> None:
        """Note what the report shows of the model at work."""
        if self._is_lead:
            write_whole(self.path / "examples.json", json.dumps(_finite(examples)).encode())

    @property
    def pictures(self) -> Path:
        """Folder of the pictures that the examples name."""
        return self.path / "pictures"

    @property
    def checkpoints(self) -> Path:
        """Folder of the last and the best checkpoint."""
        return self.path / CHECKPOINTS

    @property
    def _metrics(self) -> Path:
        return self.path / "metrics.jsonl"

    def _write_config(self, options: TrainOptions, job: str) -> None:
        write_config(options, job, self.path / CONFIG)


def _read_line(line: bytes) -> dict[str, Any] | None:
    """A line of the metrics; None if it is none that `RunFolder.add` has written."""
    try:
        record = parse_json(line)
    except ValueError:
        return None
    if not isinstance(record, dict) or not line.endswith(b"\n"):
        return None
    whole = all(type(record.get(name)) is int for name in ("epoch", "step"))
    return record if whole and record.get("kind") in ("epoch", "steps") else None


def _finite(value: Any) -> Any:
    """JSON has no infinities."""
    if isinstance(value, dict):
        return {name: _finite(part) for name, part in value.items()}
    if isinstance(value, list | tuple):
        return [_finite(part) for part in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value


def _scalars(line: dict[str, Any]) -> Iterable[tuple[str, float]]:
    where = "train" if line["kind"] == "steps" else "epoch"
    for name in ("loss", "lr", "samples_per_s", "train_s", "evaluate_s"):
        if name in line:
            yield f"{where}/{name}", line[name]
    for name, value in line.get("scores", {}).items():
        yield f"test/{name}", value
