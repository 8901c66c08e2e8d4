"""The folder of a run: what it was asked for, how it went, what it made.

``config.toml`` holds all options, ``run.json`` what the run is and its best epoch, ``scan.json``
what was seen of the data's files, so that a run that goes on need not read them all again,
``metrics.jsonl`` one line every few steps and every epoch, ``tensorboard/`` the same as events,
``checkpoints/`` the last and the best state, ``examples.json`` and ``pictures/`` what the report
shows, ``report.html`` the report. Only the lead writes.
"""

from __future__ import annotations

import fcntl
import importlib.util
import json
import math
import os
import tempfile
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from onefold.errors import DataError, LaunchError
from onefold.jobs.options import TrainOptions, write_config

__all__ = [
    "CHECKPOINTS",
    "CONFIG",
    "RUN",
    "SCAN",
    "RunFolder",
    "check_folder",
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
        tempfile.TemporaryFile(dir=nearest).close()
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
    try:
        lock = os.open(folder / LOCK, os.O_RDONLY)
    except FileNotFoundError:
        return
    try:
        fcntl.lockf(lock, fcntl.LOCK_SH | fcntl.LOCK_NB)  # shared: others may look as well
    except OSError as error:
        raise _held(folder, error) from error
    finally:
        os.close(lock)


def _held(folder: Path, error: OSError) -> LaunchError:
    return LaunchError(
        f"{folder}: another process is at work in this folder ({error.strerror}); wait for its "
        f"end, or give this run another --name"
    )


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
    if not path.is_file():
        raise DataError(f"{folder}: expected the folder of a run, with run.json in it")
    try:
        said: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
    except ValueError as error:
        raise DataError(f"{path}: expected JSON: {error}") from error
    if job is not None and said.get("job") != job:
        raise DataError(f"{folder}: expected a run of onefold train {job}, got {said.get('job')}")
    return said


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
            _write_whole(self.path / name, content)
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
        _write_whole(self._metrics, "".join(json.dumps(line) + "\n" for line in lines))
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
        self._locked = os.open(self.path / LOCK, os.O_RDWR | os.O_CREAT, 0o666)
        try:
            fcntl.lockf(self._locked, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            raise _held(self.path, error) from error

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
            _write_whole(self.path / RUN, json.dumps(_finite(self._said), indent=1))

    def add(self, line: dict[str, Any]) -> None:
        """Add a line to the metrics, and the same to the events."""
        if not self._is_lead:
            return
        with self._metrics.open("a", encoding="utf-8") as file:
            file.write(json.dumps(_finite(line)) + "\n")
        if self._events is not None:
            for name, value in _scalars(line):
                self._events.add_scalar(name, value, line["step"])

    def lines(self) -> list[dict[str, Any]]:
        """The metrics so far; a last line that was cut off is left out."""
        if not self._metrics.is_file():
            return []
        whole = self._metrics.read_text(encoding="utf-8").rpartition("\n")[0]
        return [json.loads(line) for line in whole.splitlines()]

    def keep_scan(self, scan: str) -> None:
        """Note what was seen of the data's files."""
        if self._is_lead and scan:
            _write_whole(self.path / SCAN, scan)

    def write_examples(self, examples: dict[str, Any]) -> None:
        """Note what the report shows of the model at work."""
        if self._is_lead:
            _write_whole(self.path / "examples.json", json.dumps(_finite(examples)))

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
        aside = self.path / f".{CONFIG}.new"
        write_config(options, job, aside)
        os.replace(aside, self.path / CONFIG)


def _write_whole(path: Path, content: str) -> None:
    aside = path.with_name(f".{path.name}.new")
    with aside.open("w", encoding="utf-8") as file:
        file.write(content)
        file.flush()
        os.fsync(file.fileno())
    os.replace(aside, path)


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
