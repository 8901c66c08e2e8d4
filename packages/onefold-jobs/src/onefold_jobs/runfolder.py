"""The folder of a run: its options, what happened in it, and what came out.

``config.toml`` holds all options, ``run.json`` what the run is and its best epoch, ``scan.json``
what the look through the data's files found, so that a run that resumes need not read them all
again, ``run.record`` every step and evaluation (see `onefold.Record`), ``tensorboard/`` their
numbers as events, ``checkpoints/`` the last and the best state, ``examples.json`` and ``pictures/``
what the report shows, ``report.html`` the report. Only the lead writes.

Note: whom the folder is protected from
---------------------------------------
Two commands may be given the same run at the same time. Names and folders are checked early, so
that an honest mistake costs nothing; what counts is the lock, which the lead takes before it
writes, and the second look at the folder that follows. And the folder may be written to by others:
what is read from it is bounded and checked, and nothing is written through a link. ``config.toml``
is what makes a folder a run, so it is written after all that the model needs.
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
"""Path of a checkpoint below the folder of its run."""
CONFIG = "config.toml"
RUN = "run.json"
SCAN = "scan.json"
_INSTEAD = "give this run another --name"

_TRIED_BYTES = 4096
_LARGEST = 176
"""The longer side of a report's pictures, in pixels at most."""
_SMALL = 64
"""A picture without a longer side is kept to the pixel, as a page shows each of its pixels."""
_QUALITY = 80
"""Of JPEG files: a report of some fifty pictures has less than a megabyte."""
FAULTS = ArithmeticError, AttributeError, LookupError, OSError, RuntimeError, TypeError, ValueError
"""What facts of another kind than expected may raise."""


def next_name(runs: Path, job: str) -> str:
    """Find the first name, made of the job and a number, that is free."""
    # A proposal: another process may take it meanwhile, and the lock decides between them.
    names = (f"{job}-{number}" for number in count(1))
    return next(name for name in names if not (runs / name).exists())


def path_inside(folder: Path, name: object) -> Path:
    """Find a file that a run's folder names in itself.

    Raises:
        ValueError: the name leads elsewhere.
    """
    # Resolved: "..", an absolute path or a link could lead to any file of this machine.
    path = (folder / str(name or "")).resolve()
    if not path.is_relative_to(folder.resolve()):
        raise ValueError(f"{folder}: expected names of files in it, got {name!r}")
    return path


def check_own_folders(folder: Path) -> None:
    """Refuse a run whose inner folders are links, as checkpoints and events would go elsewhere.

    Raises:
        OSError: one of them is a link, or no folder.
    """
    for name in (CHECKPOINTS, "pictures", "tensorboard", "wandb"):
        with suppress(FileNotFoundError), open_folder(folder / name, below=folder):
            pass


def check_folder(folder: Path, *, resume: bool) -> None:
    """Refuse to begin a run where there is one, or to resume one that does not exist.

    Raises:
        LaunchError: a new run's folder exists already, or there is no run to resume.
    """
    if not resume:
        check_folder_is_free(folder)
    begun = (folder / CONFIG).is_file()
    if not begun and folder.exists():
        raise LaunchError(f"{folder} is there, but holds no run: another --name begins one")
    if not begun and resume:
        raise LaunchError(f"--resume: there is no run in {folder}; leave --resume out to begin one")


def require_writable(folder: Path, otherwise: str) -> None:
    """Refuse a folder that cannot be written to, or cannot be created.

    Args:
        folder: the folder, which need not exist yet.
        otherwise: what to do about it, for the error.

    Raises:
        LaunchError: no file can be written there.
    """
    nearest = next(path for path in (folder, *folder.absolute().parents) if path.exists())
    try:
        with tempfile.TemporaryFile(dir=nearest) as file:
            # On a full disk a file can often be created, and not filled.
            file.write(bytes(_TRIED_BYTES))
    except OSError as error:
        raise LaunchError(
            f"{folder}: expected a folder that can be written to, got {error.strerror} in "
            f"{nearest}: {otherwise}"
        ) from error


def require_room(folder: Path) -> None:
    """Refuse a run's folder that could not be written to, before anything takes time.

    Args:
        folder: the folder of the run, which need not exist yet.

    Raises:
        LaunchError: no file can be written there, or another process is using it.
        OSError: a folder in it is a link.
    """
    require_writable(folder, "--runs names another one")
    check_own_folders(folder)
    require_writable(folder / CHECKPOINTS, "mend it, or give this run another --name")
    # Only a look, which is given up at once: the data are read first, and the lock that lasts is
    # taken by the lead's process.
    FolderLock(folder, instead=_INSTEAD).refuse_held()


def check_folder_is_free(folder: Path) -> None:
    """Refuse to write over a run.

    Raises:
        LaunchError: the folder holds a run.
    """
    if (folder / CONFIG).is_file():
        raise LaunchError(
            f"{folder} is there already: --resume goes on with it, another --name begins a new run"
        )


def read_run(folder: Path, job: str | None = None, shape: Any = dict) -> dict[str, Any]:
    """Read a run's ``run.json``.

    Args:
        folder: the folder of the run.
        job: the job that the run must be of; None takes any.
        shape: what the facts must be convertible to, for msgspec.

    Raises:
        DataError: the folder is not that of a run, the run is of another job, or the file is
            damaged.
    """
    path = folder / RUN
    if not path.is_file():
        raise DataError(f"{folder}: expected the folder of a run, with {RUN} in it")
    facts = read_object(path, shape)
    if job is not None and facts.get("job") != job:
        raise DataError(f"{folder}: expected a run of onefold train {job}, got {facts.get('job')}")
    return facts


def read_object(path: Path, shape: Any = dict) -> dict[str, Any]:
    """Read a file of facts by name, as a run writes them.

    Args:
        path: path of the file.
        shape: what the facts must be convertible to, for msgspec.

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
    """Turn whatever reading the facts of ``run.json`` may raise into one error that names the file.

    Raises:
        DataError: a fact is missing, or is of another kind.
    """
    try:
        yield
    except OnefoldError:
        # Before the others: some of ours are a ValueError as well, and have better words.
        raise
    except FAULTS as error:
        raise DataError(
            f"{folder / RUN}: expected what the run has kept of its model, got {error!r}"
        ) from error


class RunFolder:
    """Writes a run's folder, on the lead; elsewhere it does nothing.

    Args:
        path: path of the folder.
        is_lead: whether this process is the lead, which alone writes.
    """

    def __init__(self, path: Path, *, is_lead: bool) -> None:
        self.path = path
        self._is_lead = is_lead
        self._logger: OpenLogger | None = None
        # Once taken, it keeps other processes out of this run until `close` or the end of this one.
        self._lock = FolderLock(path, instead=_INSTEAD)
        self._said: dict[str, Any] = {}

    def create(self, options: TrainOptions, job: str, files: Mapping[str, str]) -> None:
        """Create the folder, with the options and the files that belong to the model."""
        if not self._is_lead:
            return
        self.path.mkdir(parents=True, exist_ok=True)
        self._lock.acquire()
        # Once more, now that nobody else can begin a run here: one may have been begun since.
        check_folder_is_free(self.path)
        for name, content in files.items():
            write_whole(self.path / name, content.encode())
        write_config(options, job, self.path / CONFIG)

    def go_on(self, options: TrainOptions, job: str) -> None:
        """Resume the run, with other options perhaps."""
        if not self._is_lead:
            return
        self._lock.acquire()
        check_own_folders(self.path)
        # There is none if the run was stopped right after its folder had been made.
        if (self.path / RUN).is_file():
            self._said = read_run(self.path)
        write_config(options, job, self.path / CONFIG)

    def open_events(self, options: TrainOptions, step: int) -> None:
        """Open the logger that the options name, or TensorBoard's if that is installed.

        Args:
            options: of the run.
            step: the first whose events are written from here on.

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
        """Write out all events, and let other processes resume the run."""
        logger, self._logger = self._logger, None
        try:
            if logger is not None:
                logger.close()
        # As in `add_events`.
        except Exception as error:
            _log.warning("the logger did not close: %s", error)
        finally:
            # Last of all: from here on another process may write into this folder.
            self._lock.let_go()

    def say(self, **facts: Any) -> None:
        """Record facts in ``run.json``, besides those that it has."""
        if self._is_lead:
            self._said.update(facts)
            write_whole(self.path / RUN, json_text(self._said, indent=1).encode())

    def add_events(self, where: str, step: int, numbers: Mapping[str, float]) -> None:
        """Add numbers to the events, each by the name ``WHERE/NAME``."""
        if self._logger is None:
            return
        try:
            self._logger.write({f"{where}/{name}": numbers[name] for name in numbers}, step)
        # A server that cannot be reached, say: the numbers are in the record all the same.
        except Exception as error:
            _log.warning("nothing more is logged: %s", error)
            self._logger = replace(self._logger, write=lambda numbers, step: None)

    def keep_scan(self, scan: str) -> None:
        """Record what the look through the data's files found."""
        if self._is_lead and scan:
            write_whole(self.path / SCAN, scan.encode())

    def write_examples(self, examples: dict[str, Any]) -> None:
        """Record what the report shows of the model's predictions."""
        if self._is_lead:
            write_whole(self.path / "examples.json", json_text(examples).encode())

    def save_picture(self, picture: Image, name: object) -> str:
        """Write a picture of the examples at the size of a report.

        Returns:
            Its path within the folder of the run, on every device.
        """
        small = picture
        if max(picture.size) > _LARGEST:
            # thumbnail works in place, and the picture may be the data set's own.
            small = picture.copy()
            small.thumbnail((_LARGEST, _LARGEST))
        content, kind = _packed(small)
        path = self.path / "pictures" / f"{name}.{kind}"
        if self._is_lead:
            write_whole(path, content, sync=False, below=self.path)
        return str(path.relative_to(self.path))

    @property
    def checkpoints(self) -> Path:
        """Folder of the last and the best checkpoint."""
        return self.path / CHECKPOINTS


def _packed(picture: Image) -> tuple[bytes, str]:
    """Pack a picture as PNG or as JPEG, whichever is smaller; return the ending of its file too."""
    lossless, lossy = BytesIO(), BytesIO()
    picture.save(lossless, format="PNG", optimize=True)
    if max(picture.size) <= _SMALL or picture.mode not in ("L", "RGB"):
        return lossless.getvalue(), "png"
    picture.save(lossy, format="JPEG", quality=_QUALITY)
    packed = {"png": lossless.getvalue(), "jpg": lossy.getvalue()}
    kind = min(packed, key=lambda each: len(packed[each]))
    return packed[kind], kind
