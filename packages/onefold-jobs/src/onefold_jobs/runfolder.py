"""The folder of a run: options, events and results.

``config.toml`` contains all options, ``run.json`` the facts of the run and its best epoch,
``scan.json`` the result of scanning the data files, so that a resume does not read all of them,
``run.record`` every step and evaluation (see `onefold.Record`), ``tensorboard/`` their metrics,
``checkpoints/`` the last and the best state, ``examples.json`` and ``pictures/`` the examples of
the report, and ``report.html`` the report. Only the lead writes.

Note: protection of the folder
------------------------------
Two commands may use the same run at the same time. Names and folders are checked early, so that an
honest mistake costs nothing, but what counts is the lock, which the lead acquires before it writes,
and the second check of the folder after that. Other users may also be able to write to the folder:
everything read from it has a size limit and is validated, and nothing is written through a link.
``config.toml`` makes a folder a run, so it is written after everything that the model needs.
"""

from __future__ import annotations

import importlib.util
import logging
import tempfile
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import asdict, replace
from io import BytesIO
from itertools import count
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import msgspec

from onefold.errors import DataError, LaunchError, OnefoldError
from onefold.files import (
    FolderLock,
    json_text,
    open_folder,
    parse_json,
    read_plain,
    write_whole,
)
from onefold_jobs.loggers import OpenLogger, open_logger
from onefold_jobs.options import TrainOptions, write_config

if TYPE_CHECKING:
    from PIL.Image import Image

__all__ = [
    "CHECKPOINTS",
    "CONFIG",
    "FAULTS",
    "RUN",
    "SCAN",
    "RunFolder",
    "SavedName",
    "check_folder",
    "kept_facts",
    "next_name",
    "path_inside",
    "read_object",
    "read_run",
    "require_room",
    "require_writable",
]

_log = logging.getLogger("onefold")
CHECKPOINTS = "checkpoints"
SavedName = Annotated[str, msgspec.Meta(pattern=rf"\A{CHECKPOINTS}/step-[0-9]{{8,}}\Z")]
"""Path of a checkpoint relative to the folder of its run."""
CONFIG = "config.toml"
RUN = "run.json"
SCAN = "scan.json"
_INSTEAD = "give this run another --name"

_TRIED_BYTES = 4096
_LARGEST = 176
"""Maximum length of the longer side of a report's images, in pixels."""
_SMALL = 64
"""Images up to this side are stored losslessly, because a page shows each of their pixels."""
_QUALITY = 80
"""JPEG quality: a report with about fifty images stays below a megabyte."""
FAULTS = ArithmeticError, AttributeError, LookupError, OSError, RuntimeError, TypeError, ValueError
"""Exceptions that facts of an unexpected type may raise."""


def next_name(runs: Path, job: str) -> str:
    """Find the first free name made of the job and a number."""
    # This is only a proposal: if another process takes it meanwhile, the lock decides.
    names = (f"{job}-{number}" for number in count(1))
    return next(name for name in names if not (runs / name).exists())


def path_inside(folder: Path, name: object) -> Path:
    """Return the path of a file that a run's folder refers to.

    Raises:
        ValueError: the path is outside the folder.
    """
    # Resolve first: "..", an absolute path or a link could refer to any file of this machine.
    path = (folder / str(name or "")).resolve()
    if not path.is_relative_to(folder.resolve()):
        raise ValueError(f"{folder}: expected names of files in it, got {name!r}")
    return path


def check_own_folders(folder: Path) -> None:
    """Reject a run whose inner folders are links, which would redirect checkpoints and events.

    Raises:
        OSError: one of them is a link, or not a folder.
    """
    for name in (CHECKPOINTS, "pictures", "tensorboard", "wandb"):
        with suppress(FileNotFoundError), open_folder(folder / name, below=folder):
            pass


def check_folder(folder: Path, *, resume: bool) -> None:
    """Reject starting a run in an existing run's folder, or resuming a run that does not exist.

    Raises:
        LaunchError: a new run's folder exists already, or there is no run to resume.
    """
    if not resume:
        check_folder_is_free(folder)
    begun = (folder / CONFIG).is_file()
    if not begun and folder.exists():
        raise LaunchError(f"{folder} exists, but does not contain a run: use another --name")
    if not begun and resume:
        raise LaunchError(f"--resume: there is no run in {folder}; leave out --resume to start one")


def require_writable(folder: Path, otherwise: str) -> None:
    """Reject a folder that cannot be written to or created.

    Args:
        folder: the folder, which does not have to exist yet.
        otherwise: instruction at the end of the error.

    Raises:
        LaunchError: no file can be written there.
    """
    nearest = next(path for path in (folder, *folder.absolute().parents) if path.exists())
    try:
        with tempfile.TemporaryFile(dir=nearest) as file:
            # On a full disk, creating a file often works, but filling it does not.
            file.write(bytes(_TRIED_BYTES))
    except OSError as error:
        raise LaunchError(
            f"{folder}: cannot write there: {error.strerror} in {nearest}: {otherwise}"
        ) from error


def require_room(folder: Path) -> None:
    """Reject a run's folder that cannot be written to, before anything takes time.

    Args:
        folder: folder of the run, which does not have to exist yet.

    Raises:
        LaunchError: no file can be written there, or another process uses it.
        OSError: a folder in it is a link.
    """
    require_writable(folder, "name another one with --runs")
    check_own_folders(folder)
    require_writable(folder / CHECKPOINTS, "fix it, or give this run another --name")
    # This check releases the lock immediately: the data are read first, and the lead's process
    # acquires the lasting lock.
    FolderLock(folder, instead=_INSTEAD).refuse_held()


def check_folder_is_free(folder: Path) -> None:
    """Reject overwriting a run.

    Raises:
        LaunchError: the folder contains a run.
    """
    if (folder / CONFIG).is_file():
        raise LaunchError(
            f"{folder} exists already: continue it with --resume, or use another --name"
        )


def read_run(folder: Path, job: str | None = None, shape: Any = dict) -> dict[str, Any]:
    """Read a run's ``run.json``.

    Args:
        folder: folder of the run.
        job: job that the run must belong to; None accepts any.
        shape: type that the facts must be convertible to, for msgspec.

    Raises:
        DataError: the folder does not contain a run, the run belongs to another job, or the file is
            damaged.
    """
    path = folder / RUN
    if not path.is_file():
        raise DataError(f"{folder}: expected the folder of a run, which contains {RUN}")
    facts = read_object(path, shape)
    if job is not None and facts.get("job") != job:
        raise DataError(f"{folder}: expected a run of onefold train {job}, got {facts.get('job')}")
    return facts


def read_object(path: Path, shape: Any = dict) -> dict[str, Any]:
    """Read a JSON object, as written by a run.

    Args:
        path: path of the file.
        shape: type that the object must be convertible to, for msgspec.

    Raises:
        DataError: the file cannot be read, is not JSON, or has another shape.
    """
    try:
        facts: dict[str, Any] = parse_json(read_plain(path).decode())
        msgspec.convert(facts, shape)
        return facts
    except (OSError, ValueError) as error:
        raise DataError(f"{path}: expected the JSON of a run, got: {error}") from error


@contextmanager
def kept_facts(folder: Path) -> Iterator[None]:
    """Turn any exception from reading the facts of ``run.json`` into an error that names the file.

    Raises:
        DataError: a fact is missing or has the wrong type.
    """
    try:
        yield
    except OnefoldError:
        # Before the others: some errors of onefold are also ValueErrors, with better messages.
        raise
    except FAULTS as error:
        raise DataError(
            f"{folder / RUN}: expected the description of the run's model, got {error!r}"
        ) from error


class RunFolder:
    """Writes a run's folder on the lead; does nothing on other devices.

    Args:
        path: path of the folder.
        is_lead: whether this process is the lead.
    """

    def __init__(self, path: Path, *, is_lead: bool) -> None:
        self.path = path
        self._is_lead = is_lead
        self._logger: OpenLogger | None = None
        # Once acquired, it keeps other processes out of this run until `close` or process exit.
        self._lock = FolderLock(path, instead=_INSTEAD)
        self._said: dict[str, Any] = {}

    def create(self, options: TrainOptions, job: str, files: Mapping[str, str]) -> None:
        """Create the folder, with the options and the files of the model."""
        if not self._is_lead:
            return
        self.path.mkdir(parents=True, exist_ok=True)
        self._lock.acquire()
        # Check again, now that no other process can start a run here: one may have started since.
        check_folder_is_free(self.path)
        for name, content in files.items():
            write_whole(self.path / name, content.encode())
        write_config(options, job, self.path / CONFIG)

    def go_on(self, options: TrainOptions, job: str) -> None:
        """Resume the run, possibly with other options."""
        if not self._is_lead:
            return
        self._lock.acquire()
        check_own_folders(self.path)
        # The file is missing if the run was stopped right after the folder was created.
        if (self.path / RUN).is_file():
            self._said = read_run(self.path)
        write_config(options, job, self.path / CONFIG)

    def open_events(self, options: TrainOptions, step: int) -> None:
        """Open the logger that the options name, or TensorBoard's if it is installed.

        Args:
            options: options of the run.
            step: first step to log.

        Raises:
            LaunchError: the logger cannot be opened.
        """
        name = options.log
        if name is None and importlib.util.find_spec("tensorboard") is not None:
            name = "tensorboard"
        if self._is_lead and name not in (None, "none"):
            known, values = self._said.get("logged_as"), asdict(options)
            before = str(known.get(name, "")) if isinstance(known, dict) else ""
            self._logger = open_logger(name, self.path, values, step=step, run_id=before)
            if self._logger.run_id:
                self.say(logged_as={name: self._logger.run_id})

    def close(self) -> None:
        """Flush all events, and let other processes resume the run."""
        logger, self._logger = self._logger, None
        try:
            if logger is not None:
                logger.close()
        # The logger's library may raise anything, as in `add_events`.
        except Exception as error:
            _log.warning("the logger did not close: %s", error)
        finally:
            # Last of all: from here on, another process may write to this folder.
            self._lock.let_go()

    def say(self, **facts: Any) -> None:
        """Add facts to ``run.json``."""
        if self._is_lead:
            self._said.update(facts)
            write_whole(self.path / RUN, json_text(self._said, indent=1).encode())

    def add_events(self, where: str, step: int, numbers: Mapping[str, float]) -> None:
        """Log numbers, each under the name ``WHERE/NAME``."""
        if self._logger is None:
            return
        try:
            self._logger.write({f"{where}/{name}": numbers[name] for name in numbers}, step)
        # The server may be unreachable, for example. The record contains the numbers anyway.
        except Exception as error:
            _log.warning("logging stops: %s", error)
            self._logger = replace(self._logger, write=lambda numbers, step: None)

    def keep_scan(self, scan: str) -> None:
        """Store the result of scanning the data files."""
        if self._is_lead and scan:
            write_whole(self.path / SCAN, scan.encode())

    def write_examples(self, examples: dict[str, Any]) -> None:
        """Store the report's examples of the model's predictions."""
        if self._is_lead:
            write_whole(self.path / "examples.json", json_text(examples).encode())

    def save_picture(self, picture: Image, name: object) -> str:
        """Write an image of the examples in the size of a report.

        Returns:
            Its path relative to the run's folder, on every device.
        """
        small = picture
        if max(picture.size) > _LARGEST:
            # thumbnail works in place, and the image may belong to the dataset.
            small = picture.copy()
            small.thumbnail((_LARGEST, _LARGEST))
        content, kind = _packed(small)
        path = self.path / "pictures" / f"{name}.{kind}"
        if self._is_lead:
            write_whole(path, content, sync=False, below=self.path)
        return str(path.relative_to(self.path))

    @property
    def checkpoints(self) -> Path:
        """Folder of the checkpoints."""
        return self.path / CHECKPOINTS


def _packed(picture: Image) -> tuple[bytes, str]:
    """Encode an image as PNG or JPEG, whichever is smaller; also return the file suffix."""
    lossless, lossy = BytesIO(), BytesIO()
    picture.save(lossless, format="PNG", optimize=True)
    if max(picture.size) <= _SMALL or picture.mode not in ("L", "RGB"):
        return lossless.getvalue(), "png"
    picture.save(lossy, format="JPEG", quality=_QUALITY)
    packed = {"png": lossless.getvalue(), "jpg": lossy.getvalue()}
    kind = min(packed, key=lambda each: len(packed[each]))
    return packed[kind], kind
