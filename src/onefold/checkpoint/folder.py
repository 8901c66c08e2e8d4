"""Checkpoints as files: written atomically, checked before use, pruned and cleaned up.

`Keeping` is the rule by which checkpoints of a directory are kept.

A checkpoint is a folder ``step-00001234`` of a directory::

    model.safetensors      parameters and buffers under the user's own names
    optimizer.safetensors  whole optimizer tensors, as NAME.KEY
    buffers.safetensors    values that the model's state_dict omits, if any
    training.safetensors   trained values, if the model's file has averages
    kept.safetensors       copies of weights that the script refers to, if any
    run.json               state of the run, and the seals of the other files

``run.json`` begins with the digest of its own bytes, computed with zeros in the digest's place.

Note: how a folder is replaced or deleted
-----------------------------------------
A new folder is written under a temporary name next to its place (``.part``), synced and renamed. A
folder that is replaced is first renamed to ``.old``, under which it is still found if the process
ends there. A folder that is deleted is first renamed to ``.gone``.

Note: who may touch a temporary folder
--------------------------------------
Before a process creates such a name, it creates and locks a file of the same name that ends in
``.lock``, and removes that file last. The kernel drops the lock when the process ends. The next
save deletes unlocked folders if they belong to this user and contain only parts of a checkpoint.
The lock file is new, has a random name and is readable only by its owner, so no process ever blocks
on it. Readers need no lock.

Note: the race of a removed lock file
-------------------------------------
A lock is on the inode, not on the name. Between the open and the lock of a lock file, its owner may
remove it, and another process may create a new one under the same name: then two processes hold
locks on two inodes, and each believes that it owns the name. So `_locked` compares the inode of the
descriptor with the name's inode after locking, and the owner removes the name *before* it unlocks:
the next process to get the lock finds no file, or another inode.
"""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import json
import logging
import os
import re
import shutil
import stat
import tempfile
import uuid
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import msgspec

from onefold.checkpoint.manifest import (
    RUN,
    TENSOR_FILES,
    age_of,
    check_stored,
    next_serial,
    read_rule,
    superseded,
)
from onefold.core.numbers import check_whole
from onefold.errors import CheckpointError
from onefold.system.safe_files import NO_LOCKS, RECORD_BYTES, parse_json, read_plain
from onefold.system.tensor_file import Seal, TensorParts, digest_file, write_tensors
from onefold.system.whole_files import write_whole
from onefold.system.words import listed

__all__ = [
    "FORMAT",
    "Checkpoint",
    "Keeping",
    "StoredCheckpoint",
    "find_checkpoint",
    "folder_of",
    "has_checkpoints",
    "is_checkpoint",
    "open_checkpoint",
    "prune",
    "readable_records",
    "try_directory",
    "write_checkpoint",
]


_log = logging.getLogger("onefold")
FORMAT = 1
"""Format of ``run.json`` and the files next to it. Newer formats are rejected."""
_FORMATS = 1000
"""Upper bound of format numbers: a larger number is damage, not a newer format."""
_NAME = re.compile(r"step-([0-9]{8,})")
_SEAL = re.compile(rb'\A\{\n  "sha256": "([0-9a-f]{64})"')
_NO_SEAL = b"0" * 64
_TRIED_BYTES = 4096


@dataclass(frozen=True, slots=True)
class StoredCheckpoint:
    """A checkpoint that is complete and undamaged."""

    folder: Path
    run: Mapping[str, Any]
    """Contents of ``run.json``."""

    def path(self, name: str) -> Path | None:
        """Return the path of one of its files; None if it has no file of that name."""
        return self.folder / name if name in self.run["files"] else None


def folder_of(directory: Path, step: int) -> Path:
    """Return the folder of a step's checkpoint."""
    return directory / f"step-{step:08d}"


def write_checkpoint(
    folder: Path,
    files: Mapping[str, Sequence[TensorParts]],
    run: Mapping[str, object],
    check: Callable[[Mapping[str, Any]], None],
) -> None:
    """Write a checkpoint, replacing an existing one.

    Args:
        folder: folder to write; see `folder_of`.
        files: tensors of each file, by the file names of this format.
        run: description of the run, as JSON.
        check: raises ValueError for a record that could not be read back. Called after the files
            are written.

    Raises:
        CheckpointError: the record could not be read back; existing checkpoints are kept.
        FileExistsError: the folder contains files that are not part of a checkpoint.
        OSError: the checkpoint could not be written; existing checkpoints are kept.
    """
    directory = folder.parent
    _check_ours(folder)
    directory.mkdir(parents=True, exist_ok=True)
    _sweep(directory)
    serial = next_serial(readable_records(directory).values())
    with _names_beside(folder) as beside:
        aside = beside("part")
        aside.mkdir()
        try:
            seals = {name: write_tensors(aside / name, files[name]) for name in files}
            when = {"serial": serial, "time": datetime.now(UTC).isoformat(timespec="seconds")}
            record = {**run, **when, "files": msgspec.to_builtins(seals)}
            _write_record(aside / RUN, record, folder, check)
            _sync(aside)
            _put_in_place(aside, folder, run.get("run"), beside("old"))
        except BaseException:
            shutil.rmtree(aside, ignore_errors=True)
            raise
    _sync(directory)


def try_directory(directory: Path) -> None:
    """Create a directory for checkpoints if necessary, and check that it is writable.

    Raises:
        OSError: the path is not a directory, or no file can be written to it.
    """
    try:
        directory.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(prefix=".onefold-", dir=directory) as tried:
            write_whole(Path(tried, "file"), bytes(_TRIED_BYTES))
    except OSError as error:
        came = "it is a file" if isinstance(error, FileExistsError) else error.strerror
        raise OSError(
            error.errno,
            f"cannot write checkpoints to {directory}: {came}. Fix this directory or choose "
            f"another one; training has not started",
        ) from error


def open_checkpoint(folder: Path) -> StoredCheckpoint:
    """Open the checkpoint in a folder, after checking every byte of it.

    Raises:
        CheckpointError: the checkpoint is damaged or of a newer format; the message names the file.
    """
    record = _read_record(folder)
    _refuse_newer(folder, record)
    for name, seal in record["files"].items():
        _check_seal(folder / name, Seal(**seal))
    return StoredCheckpoint(folder, record)


def is_checkpoint(folder: Path) -> bool:
    """Whether a folder is or was a checkpoint, by its name or by the seal in its ``run.json``."""
    if _is_named(folder):
        return True
    try:
        return _SEAL.match(read_plain(folder / RUN)) is not None
    except OSError:
        return False


def find_checkpoint(path: Path, *, leave_out: int = 0) -> StoredCheckpoint:
    """Find the newest undamaged checkpoint of a directory, or open the one at this path.

    Damaged ones are skipped with a warning. Nothing changes on disk.

    Args:
        path: a directory of checkpoints, or the folder of one.
        leave_out: number of newest undamaged ones to skip, as long as an older one remains.

    Raises:
        CheckpointError: there is no undamaged checkpoint (the message lists what is there), or one
            is of a newer format.
    """
    if _is_named(path) and ((path / RUN).exists() or not _places(path)):
        return open_checkpoint(path)
    records, damaged = _records_in(path)
    found: StoredCheckpoint | None = None
    for folder in sorted(records, key=lambda f: age_of(records[f]), reverse=True):
        try:
            found = open_checkpoint(folder)
        except CheckpointError as error:
            _refuse_newer(folder, records[folder])
            damaged[folder] = str(error)
            continue
        if not leave_out:
            break
        leave_out -= 1
    if found is not None:
        for text in damaged.values():  # all: one without a readable record may be the newest
            _log.warning("%s; using %s instead", text, found.folder)
        return found
    if damaged:
        raise CheckpointError(f"no checkpoint in {path} is usable: {'; '.join(damaged.values())}")
    raise CheckpointError(
        f"there is no checkpoint in {path}: trainer.save creates folders named step-00000001 and "
        f"so on, but {_what_is(path)}"
    )


def has_checkpoints(directory: Path) -> bool:
    """Whether there is anything for `find_checkpoint` to check."""
    return _is_named(directory) or bool(_places(directory))


def prune(directory: Path, *, run: str, keep: int) -> None:
    """Delete the older checkpoints of one run.

    In addition to the newest, this keeps the best ones by every rule that a checkpoint of the run
    was saved with, and the ones that were saved with ``keep`` of None.

    Args:
        directory: directory of the checkpoints. Files of other runs or users are not touched.
        run: name of the run.
        keep: number of newest checkpoints to keep.
    """
    records = {
        folder: record
        for folder, record in readable_records(directory).items()
        if record["run"] == run and _has_right_sizes(folder, record)
    }
    for folder in superseded(records, keep):
        _delete(folder)


def readable_records(directory: Path) -> dict[Path, dict[str, Any]]:
    """Read the ``run.json`` of each checkpoint in a directory, without checking its other files."""
    records, _ = _records_in(directory)  # loading a checkpoint reports the damaged ones
    return {folder: record for folder, record in records.items() if record["format"] <= FORMAT}


def _records_in(directory: Path) -> tuple[dict[Path, dict[str, Any]], dict[Path, str]]:
    """Read all records of a directory; return them, and the errors of damaged ones."""
    records, damaged = {}, {}
    for folder in _places(directory):
        try:
            records[folder] = _read_record(folder)
        except CheckpointError as error:
            damaged[folder] = str(error)
    return records, damaged


def _places(directory: Path) -> list[Path]:
    """Return folders that may be checkpoints, by step; also ``.old`` ones without a successor."""
    if not directory.is_dir():
        return []
    found = []
    for path in directory.iterdir():
        match = _BESIDE.fullmatch(path.name)
        is_alone = match and match[3] == "old" and not (directory / match[1]).exists()
        if is_alone or _is_named(path):
            found.append(path)
    return sorted(found, key=lambda path: int(_name_of(path).removeprefix("step-")))


def _is_named(path: Path) -> bool:
    return _NAME.fullmatch(path.name) is not None and path.is_dir()


def _name_of(folder: Path) -> str:
    match = _BESIDE.fullmatch(folder.name)
    return match[1] if match else folder.name


def _refuse_newer(folder: Path, record: Mapping[str, Any]) -> None:
    if record["format"] > FORMAT:
        raise CheckpointError(
            f"{folder} has format {record['format']}, but this version of onefold reads formats up "
            f"to {FORMAT}: install a newer onefold"
        )


def _read_record(folder: Path) -> dict[str, Any]:
    """Read ``run.json``, and check that it is undamaged and belongs to this folder."""
    with _reading(folder / RUN):
        text = read_plain(folder / RUN)
    seal = _SEAL.match(text)
    if seal is None or _sealed(text.replace(seal[1], _NO_SEAL, 1)) != text:
        raise CheckpointError(f"{folder} is damaged: {RUN} changed after it was written")
    # A matching digest does not prove that onefold wrote the file.
    try:
        record: dict[str, Any] = dict(parse_json(text))
        known = record.get("format")
        if type(known) is not int or not 0 < known < _FORMATS:
            raise ValueError("its format is missing or not valid")
        if known <= FORMAT:
            check_stored(record)
    except ValueError as error:
        raise CheckpointError(f"{folder} is damaged: {RUN} is invalid: {error}") from error
    # A folder with any other name is a deliberate copy.
    named = _NAME.fullmatch(_name_of(folder))
    if named and record["format"] <= FORMAT and record["step"] != int(named[1]):
        raise CheckpointError(
            f"{folder} is damaged: its {RUN} belongs to step {record['step']}, from another folder"
        )
    return record


def _sealed(text: bytes) -> bytes:
    """Insert a record's digest in place of its zeros, which are the first zeros in the record."""
    return text.replace(_NO_SEAL, hashlib.sha256(text).hexdigest().encode(), 1)


@contextlib.contextmanager
def _reading(path: Path) -> Iterator[None]:
    """Name the file of a checkpoint in the error of a failed read."""
    try:
        yield
    except FileNotFoundError:
        raise CheckpointError(f"{path.parent} is damaged: {path.name} is missing") from None
    except OSError as error:
        raise CheckpointError(f"{path.parent}: {path.name} could not be read: {error}") from error


def _check_seal(path: Path, expected: Seal) -> None:
    folder, name = path.parent, path.name
    with _reading(path):
        came = digest_file(path, expected.size)
    if came.size != expected.size:
        raise CheckpointError(
            f"{folder} is damaged: {name} has {came.size} bytes, but {expected.size} were written"
        )
    if came != expected:
        raise CheckpointError(
            f"{folder} is damaged: {name} changed after it was written (its SHA-256 differs)"
        )


def _what_is(path: Path) -> str:
    if not path.exists():
        return "this folder does not exist"
    if not path.is_dir():
        return "this is a file"
    names = sorted(entry.name for entry in path.iterdir())
    return f"this one contains {listed(names)}" if names else "this one is empty"


def _write_record(
    path: Path,
    record: Mapping[str, object],
    folder: Path,
    check: Callable[[Mapping[str, Any]], None],
) -> None:
    """Write a record, after checking that readers will accept it: later would be too late."""
    sealed = {"sha256": _NO_SEAL.decode(), **record}
    text = f"{json.dumps(sealed, indent=2, allow_nan=False)}\n".encode()
    if len(text) > RECORD_BYTES:
        raise ValueError(
            f"the data to save in addition to tensors takes {len(text):,} bytes, but at most "
            f"{RECORD_BYTES:,} are allowed. Keep large objects out of extra"
        )
    try:
        read = parse_json(text)
        check_stored(read)
        check(read)
    except ValueError as error:
        raise CheckpointError(
            f"{folder} was not written because it cannot be read back: {error}. If the run was "
            f"resumed from a checkpoint with this value, resume from an earlier one; existing "
            f"checkpoints are kept"
        ) from error
    # `write_whole` would not do: a kill could leave its temporary file in the folder, which would
    # then contain more than parts of a checkpoint and would never be deleted.
    with path.open("xb") as file:
        file.write(_sealed(text))
        file.flush()
        os.fsync(file.fileno())


def _put_in_place(aside: Path, folder: Path, run: object, old: Path) -> None:
    if not folder.exists():
        os.rename(aside, folder)
        return
    there = run
    with contextlib.suppress(CheckpointError):
        there = _read_record(folder).get("run")
    is_anothers = there not in (None, run)
    if is_anothers:
        old = folder.with_name(f"{folder.name}.of-another-run-{uuid.uuid4().hex[:8]}")
    # Between the renames only the old one exists, which `_places` finds. Delete it last.
    os.rename(folder, old)
    os.rename(aside, folder)
    if is_anothers:
        _log.warning("%s existed from another run and was renamed to %s", folder, old.name)
    else:
        shutil.rmtree(old)


def _has_right_sizes(folder: Path, record: Mapping[str, Any]) -> bool:
    paths = {folder / name: seal["size"] for name, seal in record["files"].items()}
    return all(path.is_file() and path.stat().st_size == size for path, size in paths.items())


@dataclass(frozen=True, slots=True)
class Checkpoint:
    """A checkpoint that a run was resumed from; see `Trainer.load`."""

    folder: Path
    """Folder of the checkpoint."""
    step: int
    """Number of finished steps."""
    epoch: int
    """Epoch in which the run resumes, counted from 0, as `Trainer.epochs` counts."""
    scores: Mapping[str, float]
    """Scores that were passed to `Trainer.save`."""
    extra: object
    """Extra data that was passed to `Trainer.save`."""


@dataclass(frozen=True, slots=True)
class Keeping:
    """The rule by which later saves keep or delete the checkpoints of a run."""

    newest: int | None
    """Number of newest checkpoints to keep; None keeps this checkpoint permanently."""
    best: str | None = None
    """Rule for one more to keep; see `Trainer.save`."""
    scores: Mapping[str, float] = field(default_factory=dict)
    """Scores of this checkpoint."""

    @classmethod
    def checked(cls, newest: int | None, best: str | None, scores: Mapping[str, float]) -> Keeping:
        """Check the user's arguments, and return the rule.

        Raises:
            TypeError, ValueError: an argument has a wrong type or value.
        """
        if newest is not None:
            check_whole("keep", newest, least=1)
        for name, value in scores.items():
            if not isinstance(name, str) or not isinstance(value, int | float):
                raise TypeError(f"scores must map names to numbers, but got {name!r}: {value!r}")
        if best is not None and any(name not in scores for name, _ in read_rule(best)):
            raise ValueError(
                f"best is {best!r}, but scores has no score of that name, only {list(scores)}"
            )
        return cls(newest, best, {name: float(value) for name, value in scores.items()})


_BESIDE = re.compile(r"\.(step-[0-9]{8,})\.([0-9a-f]{8})\.(part|old|gone|lock)")


def _delete(folder: Path) -> None:
    """Delete a checkpoint, unless its folder contains anything else."""
    if folder.is_symlink() or _strange_files(folder):
        return
    # Rename first, so that no partial checkpoint is ever found under its name. If another process
    # deletes it too, only one rename succeeds.
    with contextlib.suppress(FileNotFoundError), _names_beside(folder) as beside:
        os.rename(folder, beside("gone"))
        shutil.rmtree(beside("gone"))


def _sweep(directory: Path) -> None:
    """Clean up after killed writers, and skip what cannot be cleaned up."""
    left: dict[tuple[str, str], list[Path]] = {}
    for path in directory.iterdir():
        if match := _BESIDE.fullmatch(path.name):
            folders = left.setdefault((match[1], match[2]), [])
            if match[3] != "lock":
                folders.append(path)
    for (name, word), folders in left.items():
        lock = _lock_of(directory / name, word)
        # Under the lock, so that the folder of a living process is never touched.
        with contextlib.suppress(OSError):
            if (descriptor := _locked(lock, is_new=False)) is None:
                continue
            try:
                for folder in filter(_is_our_leftover, folders):
                    # Killed between the two renames of a replacement: this is the only copy left.
                    if folder.suffix == ".old" and not (directory / name).exists():
                        os.rename(folder, directory / name)
                    else:
                        shutil.rmtree(folder)
            finally:
                _let_go(descriptor, lock)


def _is_our_leftover(folder: Path) -> bool:
    """Whether this user owns the folder and it contains only parts of a checkpoint."""
    # `lstat`, because `stat` would follow a symbolic link to a foreign folder.
    there = folder.lstat()
    ours = stat.S_ISDIR(there.st_mode) and there.st_uid == os.geteuid()
    return ours and not _strange_files(folder)


def _lock_of(folder: Path, word: str) -> Path:
    return folder.with_name(f".{folder.name}.{word}.lock")


@contextlib.contextmanager
def _names_beside(folder: Path) -> Iterator[Callable[[str], Path]]:
    """Yield a function that maps endings to names next to a folder, reserved for this process."""
    descriptor = None
    # Between creating and locking the file, a sweep may take it for abandoned.
    while descriptor is None:
        word = uuid.uuid4().hex[:8]
        lock = _lock_of(folder, word)
        descriptor = _locked(lock, is_new=True)
    try:
        yield lambda ending: folder.with_name(f".{folder.name}.{word}.{ending}")
    finally:
        _let_go(descriptor, lock)


def _locked(lock: Path, *, is_new: bool) -> int | None:
    """Open and lock a lock file, a new one or an abandoned one.

    Returns:
        Its descriptor; None if another process holds the lock, or the name now has another file.

    Raises:
        OSError: the file cannot be opened, or the file system cannot tell whether it is locked.
    """
    # O_CREAT, because an abandoned lock may have been removed; O_NOFOLLOW and O_NONBLOCK, because
    # another user may have put a link or a pipe under this name.
    flags = os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC
    descriptor = os.open(lock, flags | (os.O_EXCL if is_new else 0), 0o600)
    with contextlib.ExitStack() as leaving:
        leaving.callback(os.close, descriptor)
        with contextlib.suppress(BlockingIOError, FileNotFoundError):
            try:
                fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except OSError as error:
                # Some file systems have no locks: write new files there anyway.
                if not is_new or error.errno not in NO_LOCKS:
                    raise
            there = os.fstat(descriptor)
            # A file server may assign a new file to another user.
            is_ours = is_new or there.st_uid == os.geteuid()
            if is_ours and os.path.samestat(there, lock.lstat()):
                leaving.pop_all()
                return descriptor
    return None


def _let_go(descriptor: int, lock: Path) -> None:
    # Unlink before unlocking; see the note at the top. The folder may be gone by now.
    with contextlib.suppress(OSError):
        lock.unlink()
    # Closing is not enough: a forked child shares the open file, and therefore the lock.
    with contextlib.suppress(OSError):
        fcntl.flock(descriptor, fcntl.LOCK_UN)
    os.close(descriptor)


def _check_ours(folder: Path) -> None:
    """Raise if writing a checkpoint would replace anything but a checkpoint.

    Raises:
        FileExistsError: the folder is a symbolic link, or contains files that are not part of a
            checkpoint.
    """
    if folder.is_symlink():
        raise FileExistsError(f"{folder} is a symbolic link. Save to another folder")
    if folder.exists() and (strange := _strange_files(folder)):
        raise FileExistsError(
            f"{folder} contains files that are not part of a checkpoint: {', '.join(strange)}. "
            f"Save to another folder, or move them"
        )


def _strange_files(folder: Path) -> list[str]:
    return sorted({path.name for path in folder.iterdir()} - {RUN, *TENSOR_FILES})


def _sync(directory: Path) -> None:
    """Flush the names in a directory to disk: syncing a file does not include its name."""
    descriptor = os.open(directory, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
