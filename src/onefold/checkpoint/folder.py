"""Checkpoints as files: written whole or not at all, checked before use, pruned and tidied up.

`Keeping` says which checkpoints of a directory stay.

A checkpoint is a folder ``step-00001234`` of a directory::

    model.safetensors      parameters and buffers under the user's own names
    optimizer.safetensors  the optimizer's tensors, whole, as NAME.KEY
    buffers.safetensors    what the model's state_dict leaves out; only where there is any
    training.safetensors   the trained values, if the model's file has averages
    kept.safetensors       copies of weights that the script refers to; only where there are any
    run.json               where the run is, and the seals of the other files

``run.json`` begins with the digest of its own bytes, taken with zeros in the digest's place.

Note: how a folder comes and goes
---------------------------------
It is written under another name beside its place (``.part``), synced and renamed. One that is to be
replaced is first renamed to ``.old``, by which it is still found if the process ends there. One
that is to be deleted is first renamed to ``.gone``.

Note: who works on such a folder
--------------------------------
Before a process makes such a name, it makes a file of the same name that ends in ``.lock``, and
locks it; it removes the file last. The kernel drops the lock with the process, and what nobody has
locked is swept up at the next save, if it is this user's and holds only parts of a checkpoint. The
file is new, its name is random and only its owner can open it, so nobody waits for such a lock.
Readers need none.

Note: a lock file that is removed
---------------------------------
A lock lies on the inode, not on the name. Between opening a lock file and locking it, its owner may
have removed it, and another process may have made a new one under the same name: then two processes
hold locks on two inodes, and each takes the name for its own. So after locking, the inode of the
descriptor is compared with that of the name (`_locked`), and the owner removes the name *before* it
unlocks: the next to get the lock finds nothing there, or another inode.
"""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import json
import logging
import math
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

from onefold.checkpoint.manifest import RUN, TENSOR_FILES, check_stored, next_serial
from onefold.core.encoding import from_json
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
    "best_of",
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
"""The format of ``run.json`` and the files beside it; a newer one is refused."""
_FORMATS = 1000
"""More than there will ever be: a larger number is damage, not a newer format."""
_NAME = re.compile(r"step-([0-9]{8,})")
_SEAL = re.compile(rb'\A\{\n  "sha256": "([0-9a-f]{64})"')
_NO_SEAL = b"0" * 64
_TRIED_BYTES = 4096


@dataclass(frozen=True, slots=True)
class StoredCheckpoint:
    """A checkpoint that was found complete and undamaged."""

    folder: Path
    run: Mapping[str, Any]
    """The content of ``run.json``."""

    def path(self, name: str) -> Path | None:
        """The path of one of its files; None if it has no file of that name."""
        return self.folder / name if name in self.run["files"] else None


def _read_rule(rule: str) -> tuple[str, int]:
    """Read the name of a score from a rule, and 1 if the highest is best, -1 if the lowest.

    Raises:
        ValueError: the rule is neither ``"highest NAME"`` nor ``"lowest NAME"``.
    """
    order, _, score = rule.partition(" ")
    if order not in ("highest", "lowest") or not score:
        raise ValueError(f'expected best to be "highest NAME" or "lowest NAME", got {rule!r}')
    return score, 1 if order == "highest" else -1


def folder_of(directory: Path, step: int) -> Path:
    """The folder of a step's checkpoint."""
    return directory / f"step-{step:08d}"


def write_checkpoint(
    folder: Path,
    files: Mapping[str, Sequence[TensorParts]],
    run: Mapping[str, object],
    check: Callable[[Mapping[str, Any]], None],
) -> None:
    """Write a checkpoint, replacing one that is there.

    Args:
        folder: where to, see `folder_of`.
        files: the tensors of each file, by the file names of this format.
        run: what is said about the run, as JSON.
        check: raises ValueError for a record of a run that could not be used when it is read;
            called after the files are written.

    Raises:
        CheckpointError: the record could not be used; what was there before still is.
        FileExistsError: the folder holds files that are no part of a checkpoint.
        OSError: the checkpoint could not be written; what was there before still is.
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
    """Make a directory for checkpoints, and check that files can be written to it.

    Raises:
        OSError: something else is in its place, or no file can be written to it.
    """
    try:
        directory.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(prefix=".onefold-", dir=directory) as tried:
            write_whole(Path(tried, "file"), bytes(_TRIED_BYTES))
    except OSError as error:
        came = "a file" if isinstance(error, FileExistsError) else error.strerror
        raise OSError(
            error.errno,
            f"{directory}: expected a directory that checkpoints can be written to, got {came}: "
            f"name another one, or mend this one, before anything is trained",
        ) from error


def open_checkpoint(folder: Path) -> StoredCheckpoint:
    """Open the checkpoint of a folder, after checking that every byte is as it was written.

    Raises:
        CheckpointError: it is damaged, or of a newer format; the message names the file.
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

    Damaged ones are passed over with a warning. Nothing is changed on the disk.

    Args:
        path: a directory of checkpoints, or the folder of one.
        leave_out: how many of the newest undamaged ones to pass over, as long as there is one more.

    Raises:
        CheckpointError: there is no checkpoint, none is undamaged (the message says what was
            found), or one is of a newer format.
    """
    if _is_named(path) and ((path / RUN).exists() or not _places(path)):
        return open_checkpoint(path)
    records, damaged = _records_in(path)
    found: StoredCheckpoint | None = None
    for folder in sorted(records, key=lambda f: _age(records[f]), reverse=True):
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
        for text in damaged.values():  # all: one with no readable record may be the newest
            _log.warning("%s; %s is used instead", text, found.folder)
        return found
    if damaged:
        raise CheckpointError(f"no checkpoint of {path} can be used: {'; '.join(damaged.values())}")
    raise CheckpointError(
        f"there is no checkpoint in {path}: expected folders called step-00000001 and so on as "
        f"trainer.save makes them; {_what_is(path)}"
    )


def has_checkpoints(directory: Path) -> bool:
    """Whether there is anything that `find_checkpoint` would look at."""
    return _is_named(directory) or bool(_places(directory))


def prune(directory: Path, *, run: str, keep: int) -> None:
    """Delete the older checkpoints of one run.

    Besides the newest, those stay that are the best by a rule with which any of them was saved, and
    those that were saved with ``keep`` of None.

    Args:
        directory: where they lie; what another run or anybody else has put there is left alone.
        run: name of the run.
        keep: how many of the newest stay.
    """
    records = {
        folder: record
        for folder, record in readable_records(directory).items()
        if record["run"] == run and _has_right_sizes(folder, record)
    }
    ordered = sorted(records, key=lambda folder: _age(records[folder]))
    kept = set(ordered[-keep:])
    kept |= {folder for folder, record in records.items() if record["keep"] is None}
    for rule in {record["best"] for record in records.values() if record["best"]}:
        kept |= best_of(records, rule)
    for folder in ordered:
        if folder not in kept:
            _delete(folder)


def readable_records(directory: Path) -> dict[Path, dict[str, Any]]:
    """Read the ``run.json`` of each checkpoint in a directory; its other files are not checked."""
    records, _ = _records_in(directory)  # what is damaged is reported to whoever loads
    return {folder: record for folder, record in records.items() if record["format"] <= FORMAT}


def _records_in(directory: Path) -> tuple[dict[Path, dict[str, Any]], dict[Path, str]]:
    """Read all records of a directory; for those that are damaged, what is wrong with them."""
    records, damaged = {}, {}
    for folder in _places(directory):
        try:
            records[folder] = _read_record(folder)
        except CheckpointError as error:
            damaged[folder] = str(error)
    return records, damaged


def _places(directory: Path) -> list[Path]:
    """Folders that may be checkpoints, by step; ``.old`` ones if nothing replaced them."""
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


def _age(record: Mapping[str, Any]) -> tuple[int, int]:
    return record.get("serial", 0), record.get("step", 0)


def _refuse_newer(folder: Path, record: Mapping[str, Any]) -> None:
    if record["format"] > FORMAT:
        raise CheckpointError(
            f"{folder} is of format {record['format']}, this version of onefold knows formats up "
            f"to {FORMAT}: install a newer onefold"
        )


def _read_record(folder: Path) -> dict[str, Any]:
    """Read ``run.json``, and check that it is undamaged and belongs to this folder."""
    with _reading(folder / RUN):
        text = read_plain(folder / RUN)
    seal = _SEAL.match(text)
    if seal is None or _sealed(text.replace(seal[1], _NO_SEAL, 1)) != text:
        raise CheckpointError(f"{folder} is damaged: {RUN} is not as it was written")
    # That its digest is right does not mean that we have written it.
    try:
        record: dict[str, Any] = dict(parse_json(text))
        known = record.get("format")
        if type(known) is not int or not 0 < known < _FORMATS:
            raise ValueError("it does not say of what format it is")
        if known <= FORMAT:
            check_stored(record)
    except ValueError as error:
        raise CheckpointError(f"{folder} is damaged: {RUN} cannot be used: {error}") from error
    # A folder of any other name is a copy that somebody has made on purpose.
    named = _NAME.fullmatch(_name_of(folder))
    if named and record["format"] <= FORMAT and record["step"] != int(named[1]):
        raise CheckpointError(
            f"{folder} is damaged: its {RUN} is that of step {record['step']}, from another folder"
        )
    return record


def _sealed(text: bytes) -> bytes:
    """A record with its digest in place of the zeros, which come first of all zeros in it."""
    return text.replace(_NO_SEAL, hashlib.sha256(text).hexdigest().encode(), 1)


@contextlib.contextmanager
def _reading(path: Path) -> Iterator[None]:
    """Name the file of a checkpoint in the error if it cannot be read."""
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
    return f"it holds {listed(names)}" if names else "it is empty"


def _write_record(
    path: Path,
    record: Mapping[str, object],
    folder: Path,
    check: Callable[[Mapping[str, Any]], None],
) -> None:
    """Write a record, unless a reader would refuse it, who would find that when it is too late."""
    sealed = {"sha256": _NO_SEAL.decode(), **record}
    text = f"{json.dumps(sealed, indent=2, allow_nan=False)}\n".encode()
    if len(text) > RECORD_BYTES:
        raise ValueError(
            f"what is saved beside tensors takes {len(text):,} bytes: expected {RECORD_BYTES:,} at "
            f"most. Keep large things out of extra"
        )
    try:
        read = parse_json(text)
        check_stored(read)
        check(read)
    except ValueError as error:
        raise CheckpointError(
            f"{folder} is not written, as it could not be read again: {error}. If the run goes on "
            f"from a checkpoint that holds such a value, go on from an earlier one; checkpoints "
            f"that are there stay"
        ) from error
    # Not by `write_whole`: a kill could leave its other name in the folder, which would then hold
    # more than parts of a checkpoint, and so stay for good.
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
    # Between the renames only the old one exists, which `_places` finds; it goes last of all.
    os.rename(folder, old)
    os.rename(aside, folder)
    if is_anothers:
        _log.warning("%s was there from another run: it is now %s", folder, old.name)
    else:
        shutil.rmtree(old)


def _has_right_sizes(folder: Path, record: Mapping[str, Any]) -> bool:
    paths = {folder / name: seal["size"] for name, seal in record["files"].items()}
    return all(path.is_file() and path.stat().st_size == size for path, size in paths.items())


def best_of(records: Mapping[Path, Mapping[str, Any]], rule: str) -> set[Path]:
    """Find the best checkpoint by a rule, of equal ones the oldest; none if none has its score.

    Args:
        records: the ``run.json`` of each checkpoint.
        rule: ``"highest NAME"`` or ``"lowest NAME"``, of a score.

    Raises:
        ValueError: the rule is neither.
    """
    name, sign = _read_rule(rule)
    scored = [
        (-sign * value, _age(record), folder)
        for folder, record in records.items()
        if not math.isnan(value := from_json(record["scores"]).get(name, math.nan))
    ]
    return {min(scored)[2]} if scored else set()


@dataclass(frozen=True, slots=True)
class Checkpoint:
    """A checkpoint that a run was resumed from; see `Trainer.load`."""

    folder: Path
    """Where it lies."""
    step: int
    """How many steps were done."""
    epoch: int
    """The epoch in which the run goes on."""
    scores: Mapping[str, float]
    """The scores that `Trainer.save` was given."""
    extra: Any
    """The extra data that `Trainer.save` was given."""


@dataclass(frozen=True, slots=True)
class Keeping:
    """The rule by which later saves decide which checkpoints of a run stay."""

    newest: int | None
    """How many of the newest stay; None keeps this one for good."""
    best: str | None = None
    """The rule by which one more stays, ``"highest NAME"`` or ``"lowest NAME"``."""
    scores: Mapping[str, float] = field(default_factory=dict)
    """The scores of this checkpoint."""

    @classmethod
    def checked(cls, newest: int | None, best: str | None, scores: Mapping[str, float]) -> Keeping:
        """Check what a user gives, and make the rule from it.

        Raises:
            TypeError, ValueError: an argument is of a wrong type or value.
        """
        if newest is not None:
            check_whole("keep", newest, least=1)
        for name, value in scores.items():
            if not isinstance(name, str) or not isinstance(value, int | float):
                raise TypeError(f"expected scores to be numbers by name, got {name!r}: {value!r}")
        if best is not None and _read_rule(best)[0] not in scores:
            raise ValueError(
                f"best is {best!r}: expected a score of that name among scores, which has "
                f"{list(scores)}"
            )
        return cls(newest, best, {name: float(value) for name, value in scores.items()})


_BESIDE = re.compile(r"\.(step-[0-9]{8,})\.([0-9a-f]{8})\.(part|old|gone|lock)")


def _delete(folder: Path) -> None:
    """Remove a checkpoint, unless its folder holds anything else."""
    if folder.is_symlink() or _strange_files(folder):
        return
    # Renamed first, so that no half of it is ever found under a checkpoint's name. Another process
    # may be deleting it as well: one rename succeeds.
    with contextlib.suppress(FileNotFoundError), _names_beside(folder) as beside:
        os.rename(folder, beside("gone"))
        shutil.rmtree(beside("gone"))


def _sweep(directory: Path) -> None:
    """Tidy up after processes that were killed while writing; what cannot be tidied up stays."""
    left: dict[tuple[str, str], list[Path]] = {}
    for path in directory.iterdir():
        if match := _BESIDE.fullmatch(path.name):
            folders = left.setdefault((match[1], match[2]), [])
            if match[3] != "lock":
                folders.append(path)
    for (name, word), folders in left.items():
        lock = _lock_of(directory / name, word)
        # Under the lock, so that a folder of a living process is never touched.
        with contextlib.suppress(OSError):
            if (descriptor := _locked(lock, is_new=False)) is None:
                continue
            try:
                for folder in filter(_is_our_leftover, folders):
                    # Killed between the two renames of a replacement: the old checkpoint is the
                    # only one there is.
                    if folder.suffix == ".old" and not (directory / name).exists():
                        os.rename(folder, directory / name)
                    else:
                        shutil.rmtree(folder)
            finally:
                _let_go(descriptor, lock)


def _is_our_leftover(folder: Path) -> bool:
    """Whether it is a folder of this user that holds nothing but parts of a checkpoint."""
    # Not `stat`, which would follow a link to a folder that was never ours.
    there = folder.lstat()
    ours = stat.S_ISDIR(there.st_mode) and there.st_uid == os.geteuid()
    return ours and not _strange_files(folder)


def _lock_of(folder: Path, word: str) -> Path:
    return folder.with_name(f".{folder.name}.{word}.lock")


@contextlib.contextmanager
def _names_beside(folder: Path) -> Iterator[Callable[[str], Path]]:
    """Yield a function from endings to names beside a folder that are this process's alone."""
    descriptor = None
    # Between making the file and locking it, a sweep may have taken it for abandoned.
    while descriptor is None:
        word = uuid.uuid4().hex[:8]
        lock = _lock_of(folder, word)
        descriptor = _locked(lock, is_new=True)
    try:
        yield lambda ending: folder.with_name(f".{folder.name}.{word}.{ending}")
    finally:
        _let_go(descriptor, lock)


def _locked(lock: Path, *, is_new: bool) -> int | None:
    """Open and lock a lock file, of a new name or of one that somebody may have left behind.

    Returns:
        Its descriptor; None if the file is another process's, or no longer under its name.

    Raises:
        OSError: it cannot be opened, or whether somebody holds it cannot be found out.
    """
    # O_CREAT, as an abandoned lock may be gone already; O_NOFOLLOW and O_NONBLOCK, as anyone may
    # have put a link or a pipe under this name.
    flags = os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC
    descriptor = os.open(lock, flags | (os.O_EXCL if is_new else 0), 0o600)
    with contextlib.ExitStack() as leaving:
        leaving.callback(os.close, descriptor)
        with contextlib.suppress(BlockingIOError, FileNotFoundError):
            try:
                fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except OSError as error:
                # Some file systems have no locks: what is new there is written all the same.
                if not is_new or error.errno not in NO_LOCKS:
                    raise
            there = os.fstat(descriptor)
            # A file server may give a new file to another user.
            is_ours = is_new or there.st_uid == os.geteuid()
            if is_ours and os.path.samestat(there, lock.lstat()):
                leaving.pop_all()
                return descriptor
    return None


def _let_go(descriptor: int, lock: Path) -> None:
    # The name goes before the lock; see the note at the head. The folder may be gone by now.
    with contextlib.suppress(OSError):
        lock.unlink()
    # Closing is not enough: a process forked meanwhile shares the open file, and so the lock.
    with contextlib.suppress(OSError):
        fcntl.flock(descriptor, fcntl.LOCK_UN)
    os.close(descriptor)


def _check_ours(folder: Path) -> None:
    """Refuse to write a checkpoint in place of anything else.

    Raises:
        FileExistsError: the folder is a link, or holds files that are no part of a checkpoint.
    """
    if folder.is_symlink():
        raise FileExistsError(f"{folder} is a link: expected a folder of its own. Save elsewhere")
    if folder.exists() and (strange := _strange_files(folder)):
        raise FileExistsError(
            f"{folder} holds {', '.join(strange)}, which is no part of a checkpoint: expected a "
            f"folder of its own. Save elsewhere, or move these away"
        )


def _strange_files(folder: Path) -> list[str]:
    return sorted({path.name for path in folder.iterdir()} - {RUN, *TENSOR_FILES})


def _sync(directory: Path) -> None:
    """Bring the names in a directory to the disk: a file's own sync does not include its name."""
    descriptor = os.open(directory, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
