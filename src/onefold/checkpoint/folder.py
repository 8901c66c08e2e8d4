"""Checkpoints as files: written whole or not at all, checked before they are believed, tidied up.

A checkpoint is a folder ``step-00001234`` of a directory::

    model.safetensors      parameters and buffers under the user's own names
    optimizer.safetensors  the optimizer's tensors, whole, as NAME.KEY
    buffers.safetensors    what the model's state_dict leaves out; only where there is any
    run.json               where the run is, and the seals of the other files

``run.json`` begins with the digest of its own bytes, taken with zeros in the digest's place.

Note: how a folder comes and goes
---------------------------------
It is written under another name beside its place (``.part``), synced and renamed. One that is to be
replaced is first renamed to ``.old``; if nothing follows, it is still found there. One that is to
be deleted is first renamed to ``.gone``. Whoever works on such a folder holds a lock on it, which
the kernel takes away with the process; what nobody holds is swept up at the next writing.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import hashlib
import json
import logging
import math
import os
import re
import shutil
import uuid
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from onefold.checkpoint.jsonvalue import from_json
from onefold.checkpoint.tensorfile import Seal, TensorParts, digest_file, write_tensors
from onefold.errors import CheckpointError

__all__ = [
    "FORMAT",
    "RUN",
    "Best",
    "StoredCheckpoint",
    "find_checkpoint",
    "folder_of",
    "has_checkpoints",
    "prune",
    "write_checkpoint",
]

_log = logging.getLogger("onefold")

FORMAT = 1
"""Of ``run.json`` and the files beside it; a newer one is refused."""

RUN = "run.json"
"""Where the run is; written last."""
TENSOR_FILES = ("model.safetensors", "optimizer.safetensors", "buffers.safetensors")

_NAME = re.compile(r"step-(\d{8,})")
_BESIDE = re.compile(r"\.(step-\d{8,})\.[0-9a-f]{8}\.(part|old|gone)")
_SEAL = re.compile(rb'\A\{\n  "sha256": "([0-9a-f]{64})"')
_NO_SEAL = "0" * 64
_NO_LOCKS = (errno.ENOSYS, errno.ENOLCK, errno.EOPNOTSUPP, errno.EINVAL)


@dataclass(frozen=True, slots=True)
class StoredCheckpoint:
    """A checkpoint that was found whole."""

    folder: Path
    run: Mapping[str, Any]
    """What ``run.json`` says."""

    def path(self, name: str) -> Path | None:
        """Of one of its files; None if it has none of that name."""
        return self.folder / name if name in self.run["files"] else None


@dataclass(frozen=True, slots=True)
class Best:
    """Which checkpoint is kept beside the newest."""

    score: str
    """Name of a score."""
    highest: bool
    """Whether more is better."""

    @classmethod
    def read(cls, text: str) -> Best:
        """From ``"highest NAME"`` or ``"lowest NAME"``.

        Raises:
            ValueError: it is neither.
        """
        order, _, score = text.partition(" ")
        if order not in ("highest", "lowest") or not score:
            raise ValueError(f'expected best to be "highest NAME" or "lowest NAME", got {text!r}')
        return cls(score, order == "highest")


def folder_of(directory: Path, step: int) -> Path:
    """Where the checkpoint of a step lies."""
    return directory / f"step-{step:08d}"


def write_checkpoint(
    folder: Path,
    files: Mapping[str, Sequence[TensorParts]],
    describe: Callable[[], Mapping[str, object]],
) -> None:
    """Write a checkpoint, in place of one that lies there.

    Args:
        folder: see `folder_of`.
        files: tensors for each of the file names of this format.
        describe: makes the JSON about the run; called after the files are written.

    Raises:
        FileExistsError: the folder holds files that are not a checkpoint's.
        OSError: it could not be written; what lay there is still there.
    """
    directory = folder.parent
    _check_ours(folder)
    directory.mkdir(parents=True, exist_ok=True)
    _sweep(directory)
    serial = 1 + max((r.get("serial", 0) for r in _readable(directory).values()), default=0)
    with _new_folder_beside(folder) as aside:
        try:
            seals = {name: write_tensors(aside / name, files[name]) for name in files}
            told = {"serial": serial, "time": datetime.now(UTC).isoformat(timespec="seconds")}
            record = {**describe(), **told, "files": {n: asdict(seals[n]) for n in seals}}
            _write_record(aside / RUN, record)
            _sync(aside)
            _put_in_place(aside, folder, record)
        except BaseException:
            shutil.rmtree(aside, ignore_errors=True)
            raise
    _sync(directory)


def find_checkpoint(path: Path) -> StoredCheckpoint:
    """The newest checkpoint of a directory that is whole, or the one whose own folder it is.

    What is damaged is left out with a warning. Nothing is changed on the disk.

    Raises:
        CheckpointError: there is none, or none is whole; the message says what was found. Or one is
            of a newer format.
    """
    if _is_named(path) and ((path / RUN).exists() or not _places(path)):
        return _verified(path)
    places = _places(path)
    records: dict[Path, dict[str, Any]] = {}
    damaged: dict[Path, str] = {}
    for folder in places:
        try:
            records[folder] = _read_record(folder)
        except CheckpointError as error:
            damaged[folder] = str(error)
    for folder in sorted(records, key=lambda f: _age(records[f]), reverse=True):
        try:
            found = _verified(folder)
        except CheckpointError as error:
            _refuse_newer(folder, records[folder])
            damaged[folder] = str(error)
            continue
        for text in damaged.values():  # one without a record may well have been the newest
            _log.warning("%s; %s is used instead", text, folder)
        return found
    if damaged:
        raise CheckpointError(
            f"no checkpoint of {path} can be used: {'; '.join(damaged[p] for p in places)}"
        )
    there = "it is empty" if path.is_dir() and not any(path.iterdir()) else _what_is(path)
    raise CheckpointError(
        f"there is no checkpoint in {path}: expected folders called step-00000001 and so on as "
        f"trainer.save makes them; {there}"
    )


def has_checkpoints(directory: Path) -> bool:
    """Whether there is anything that `find_checkpoint` would look at."""
    return _is_named(directory) or bool(_places(directory))


def prune(directory: Path, *, run: str, keep: int) -> None:
    """Delete the older checkpoints of one run.

    Those stay as well that were the best by a rule under which one of them was saved, and those
    that were saved under ``keep`` of None.

    Args:
        directory: where they lie; what another run or anybody else put there is left alone.
        run: which run's.
        keep: how many of the newest stay.
    """
    records = {
        folder: record
        for folder, record in _readable(directory).items()
        if record.get("run") == run and _is_complete(folder, record)
    }
    ordered = sorted(records, key=lambda folder: _age(records[folder]))
    kept = set(ordered[-keep:])
    kept |= {folder for folder, record in records.items() if record["keep"] is None}
    for rule in {record["best"] for record in records.values() if record["best"]}:
        kept |= _best_of(records, Best.read(rule))
    for folder in ordered:
        if folder not in kept:
            _delete(folder)


# Reading


def _places(directory: Path) -> dict[Path, int]:
    """Every folder that may be a checkpoint, and its step; one that was being replaced if the new
    one has not come."""
    if not directory.is_dir():
        return {}
    found = {path: _step_of(path.name) for path in directory.iterdir() if _is_named(path)}
    for path in directory.iterdir():
        match = _BESIDE.fullmatch(path.name)
        if match and match[2] == "old" and not (directory / match[1]).exists():
            found[path] = _step_of(match[1])
    return dict(sorted(found.items(), key=lambda item: item[1]))


def _is_named(path: Path) -> bool:
    return _NAME.fullmatch(path.name) is not None and path.is_dir()


def _step_of(name: str) -> int:
    return int(name.removeprefix("step-"))


def _name_of(folder: Path) -> str:
    match = _BESIDE.fullmatch(folder.name)
    return match[1] if match else folder.name


def _age(record: Mapping[str, Any]) -> tuple[int, int]:
    return record.get("serial", 0), record.get("step", 0)


def _verified(folder: Path) -> StoredCheckpoint:
    """The checkpoint of a folder, if every byte of it is as it was written."""
    record = _read_record(folder)
    _refuse_newer(folder, record)
    for name, seal in record["files"].items():
        _check_seal(folder / name, Seal(**seal))
    return StoredCheckpoint(folder, record)


def _refuse_newer(folder: Path, record: Mapping[str, Any]) -> None:
    if record["format"] > FORMAT:
        raise CheckpointError(
            f"{folder} is of format {record['format']}, this version of onefold knows formats up "
            f"to {FORMAT}: install a newer onefold"
        )


def _read_record(folder: Path) -> dict[str, Any]:
    """``run.json``, if it is whole and belongs to this folder."""
    try:
        text = (folder / RUN).read_bytes()
    except FileNotFoundError:
        raise CheckpointError(f"{folder} is damaged: {RUN} is missing") from None
    except OSError as error:
        raise CheckpointError(f"{folder}: {RUN} could not be read: {error}") from error
    seal = _SEAL.match(text)
    if seal is None or _digest_of_record(text, seal[1]) != seal[1].decode():
        raise CheckpointError(f"{folder} is damaged: {RUN} is not as it was written")
    record: dict[str, Any] = json.loads(text)
    if record["format"] <= FORMAT and record["step"] != _step_of(_name_of(folder)):
        raise CheckpointError(
            f"{folder} is damaged: its {RUN} is that of step {record['step']}, from another folder"
        )
    return record


def _digest_of_record(text: bytes, seal: bytes) -> str:
    return hashlib.sha256(text.replace(seal, _NO_SEAL.encode(), 1)).hexdigest()


def _readable(directory: Path) -> dict[Path, dict[str, Any]]:
    records = {}
    for folder in _places(directory):
        with contextlib.suppress(CheckpointError):  # damaged: whoever loads is told
            records[folder] = _read_record(folder)
    return records


def _check_seal(path: Path, expected: Seal) -> None:
    folder, name = path.parent, path.name
    try:
        came = digest_file(path)
    except FileNotFoundError:
        raise CheckpointError(f"{folder} is damaged: {name} is missing") from None
    except OSError as error:
        raise CheckpointError(f"{folder}: {name} could not be read: {error}") from error
    if came.size != expected.size:
        raise CheckpointError(
            f"{folder} is damaged: {name} has {came.size} bytes, {expected.size} were written"
        )
    if came != expected:
        raise CheckpointError(
            f"{folder} is damaged: {name} has other bytes than were written (its SHA-256 differs)"
        )


def _what_is(path: Path) -> str:
    if not path.exists():
        return "there is no such folder"
    if not path.is_dir():
        return "that is a file"
    names = sorted(entry.name for entry in path.iterdir())
    more = f" and {len(names) - 5} more" if len(names) > 5 else ""
    return f"it holds {', '.join(names[:5])}{more}"


# Writing


def _write_record(path: Path, record: Mapping[str, object]) -> None:
    text = json.dumps({"sha256": _NO_SEAL, **record}, indent=2, allow_nan=False).encode() + b"\n"
    seal = hashlib.sha256(text).hexdigest()
    with path.open("xb") as file:
        file.write(text.replace(_NO_SEAL.encode(), seal.encode(), 1))
        file.flush()
        os.fsync(file.fileno())


def _put_in_place(aside: Path, folder: Path, record: Mapping[str, object]) -> None:
    if not folder.exists():
        os.rename(aside, folder)
        return
    run = _run_of(folder)
    if run not in (None, record.get("run")):
        other = folder.with_name(f"{folder.name}.of-another-run-{uuid.uuid4().hex[:8]}")
        os.rename(folder, other)
        os.rename(aside, folder)
        _log.warning("%s was there from another run: it is now %s", folder, other.name)
        return
    old = _beside(folder, "old")
    with _held(folder):
        os.rename(folder, old)
        os.rename(aside, folder)
        shutil.rmtree(old)


def _run_of(folder: Path) -> object:
    """Which run wrote a checkpoint; None if that cannot be read."""
    try:
        return _read_record(folder).get("run")
    except CheckpointError:
        return None


def _delete(folder: Path) -> None:
    if folder.is_symlink() or _strange_files(folder):
        return
    gone = _beside(folder, "gone")
    with contextlib.suppress(_InUse), _held(folder):
        os.rename(folder, gone)
        shutil.rmtree(gone)


def _sweep(directory: Path) -> None:
    """Tidy up what processes that were killed at it have left; what cannot be, stays."""
    for path in list(directory.iterdir()):
        match = _BESIDE.fullmatch(path.name)
        if match is None:
            continue
        with contextlib.suppress(_InUse, OSError), _held(path, wait=False):
            place = directory / match[1]
            if match[2] == "old" and not place.exists():
                os.rename(path, place)
            else:
                shutil.rmtree(path)


def _beside(folder: Path, what: str) -> Path:
    return folder.with_name(f".{folder.name}.{uuid.uuid4().hex[:8]}.{what}")


class _InUse(Exception):
    """Another process works on the folder, or has just tidied it up."""


@contextlib.contextmanager
def _new_folder_beside(folder: Path) -> Iterator[Path]:
    """A new folder of this process, held."""
    while True:
        aside = _beside(folder, "part")
        aside.mkdir()
        with contextlib.suppress(_InUse), contextlib.ExitStack() as stack:
            # Another process may sweep it up before it is held.
            stack.enter_context(_held(aside))
            kept = stack.pop_all()
            break
    with kept:
        yield aside


@contextlib.contextmanager
def _held(folder: Path, *, wait: bool = True) -> Iterator[None]:
    """Hold the lock of a folder, whatever it is renamed to meanwhile."""
    try:
        descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    except FileNotFoundError:
        raise _InUse from None
    try:
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | (0 if wait else fcntl.LOCK_NB))
        except BlockingIOError:
            raise _InUse from None
        except OSError as error:
            # A file system without locks: one may write there, but not tidy up after others.
            if error.errno not in _NO_LOCKS or not wait:
                raise _InUse from error
        yield
    finally:
        # A process that was forked meanwhile has the file open as well, and the lock with it.
        with contextlib.suppress(OSError):
            fcntl.flock(descriptor, fcntl.LOCK_UN)
        os.close(descriptor)


def _check_ours(folder: Path) -> None:
    if folder.is_symlink():
        raise FileExistsError(f"{folder} is a link: expected a folder of its own. Save elsewhere")
    if folder.exists() and (strange := _strange_files(folder)):
        raise FileExistsError(
            f"{folder} holds {', '.join(strange)}, which is no part of a checkpoint: expected a "
            f"folder of its own. Save elsewhere, or move these away"
        )


def _strange_files(folder: Path) -> list[str]:
    return sorted({path.name for path in folder.iterdir()} - {RUN, *TENSOR_FILES})


def _is_complete(folder: Path, record: Mapping[str, Any]) -> bool:
    paths = {folder / name: seal["size"] for name, seal in record["files"].items()}
    return all(path.is_file() and path.stat().st_size == size for path, size in paths.items())


def _best_of(records: Mapping[Path, Mapping[str, Any]], best: Best) -> set[Path]:
    sign = 1 if best.highest else -1
    scored = [
        (sign * value, _age(record), folder)
        for folder, record in records.items()
        if not math.isnan(value := from_json(record["scores"]).get(best.score, math.nan))
    ]
    return {max(scored)[2]} if scored else set()


def _sync(directory: Path) -> None:
    descriptor = os.open(directory, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
