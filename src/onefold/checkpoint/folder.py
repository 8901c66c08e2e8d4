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
be deleted is first renamed to ``.gone``.

Note: who works on such a folder
--------------------------------
Whoever makes such a name first makes a file of the same name that ends in ``.lock``, holds a lock
on it, and removes it last. The kernel takes the lock away with the process; what nobody holds is
swept up at the next writing, if it is this user's and holds nothing but parts of a checkpoint. The
file is new, has a random name, and only its owner can open it, so nobody else can hold it: there is
no lock here that anybody waits for. Readers need none.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import logging
import math
import os
import re
import shutil
import tempfile
import uuid
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from onefold.checkpoint.aside import BESIDE, check_ours, delete, names_beside, sweep, sync
from onefold.checkpoint.record import RUN, check_stored
from onefold.core.jsonvalue import from_json
from onefold.errors import CheckpointError
from onefold.system.plainfile import RECORD_BYTES, parse_json, read_plain
from onefold.system.tensorfile import Seal, TensorParts, digest_file, write_tensors

__all__ = [
    "FORMAT",
    "Best",
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
"""Of ``run.json`` and the files beside it; a newer one is refused."""
_FORMATS = 1000
"""There will never be as many."""
_NAME = re.compile(r"step-([0-9]{8,})")
_SEAL = re.compile(rb'\A\{\n  "sha256": "([0-9a-f]{64})"')
_NO_SEAL = "0" * 64
_TRIED_BYTES = 4096


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
    check_ours(folder)
    directory.mkdir(parents=True, exist_ok=True)
    sweep(directory)
    serial = 1 + max((r.get("serial", 0) for r in readable_records(directory).values()), default=0)
    with names_beside(folder) as beside:
        aside = beside("part")
        aside.mkdir()
        try:
            seals = {name: write_tensors(aside / name, files[name]) for name in files}
            told = {"serial": serial, "time": datetime.now(UTC).isoformat(timespec="seconds")}
            record = {**describe(), **told, "files": {n: asdict(seals[n]) for n in seals}}
            _write_record(aside / RUN, record)
            sync(aside)
            _put_in_place(aside, folder, record, beside("old"))
        except BaseException:
            shutil.rmtree(aside, ignore_errors=True)
            raise
    sync(directory)


def try_directory(directory: Path) -> None:
    """Make a directory of checkpoints, and a file in it that is removed again.

    Raises:
        OSError: there is something else in its place, or no file can be written to it.
    """
    try:
        directory.mkdir(parents=True, exist_ok=True)
        with (
            tempfile.TemporaryDirectory(prefix=".onefold-", dir=directory) as tried,
            open(Path(tried, "file"), "xb") as file,
        ):
            file.write(bytes(_TRIED_BYTES))
            file.flush()
            os.fsync(file.fileno())
    except OSError as error:
        came = "a file" if isinstance(error, FileExistsError) else error.strerror
        raise OSError(
            error.errno,
            f"{directory}: expected a directory that checkpoints can be written to, got {came}: "
            f"name another one, or mend this one, before anything is trained",
        ) from error


def open_checkpoint(folder: Path) -> StoredCheckpoint:
    """The checkpoint of a folder, if every byte of it is as it was written.

    Raises:
        CheckpointError: it is damaged, or of a newer format; the message names the file.
    """
    record = _read_record(folder)
    _refuse_newer(folder, record)
    for name, seal in record["files"].items():
        _check_seal(folder / name, Seal(**seal))
    return StoredCheckpoint(folder, record)


def is_checkpoint(folder: Path) -> bool:
    """Whether a folder is, or was, a checkpoint: by its name, or as its ``run.json`` has a seal."""
    if _is_named(folder):
        return True
    try:
        return _SEAL.match(read_plain(folder / RUN)) is not None
    except OSError:
        return False


def find_checkpoint(path: Path, *, leave_out: int = 0) -> StoredCheckpoint:
    """The newest checkpoint of a directory that is whole, or the one whose own folder it is.

    What is damaged is left out with a warning. Nothing is changed on the disk.

    Args:
        path: of the directory, or of one checkpoint.
        leave_out: how many of the newest that are whole are passed over, as long as there is one
            more.

    Raises:
        CheckpointError: there is none, or none is whole; the message says what was found. Or one is
            of a newer format.
    """
    if _is_named(path) and ((path / RUN).exists() or not _places(path)):
        return open_checkpoint(path)
    places = _places(path)
    records: dict[Path, dict[str, Any]] = {}
    damaged: dict[Path, str] = {}
    for folder in places:
        try:
            records[folder] = _read_record(folder)
        except CheckpointError as error:
            damaged[folder] = str(error)
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
        for text in damaged.values():  # one without a record may well have been the newest
            _log.warning("%s; %s is used instead", text, found.folder)
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
        for folder, record in readable_records(directory).items()
        if record["run"] == run and _is_complete(folder, record)
    }
    ordered = sorted(records, key=lambda folder: _age(records[folder]))
    kept = set(ordered[-keep:])
    kept |= {folder for folder, record in records.items() if record["keep"] is None}
    for rule in {record["best"] for record in records.values() if record["best"]}:
        kept |= _best_of(records, Best.read(rule))
    for folder in ordered:
        if folder not in kept:
            delete(folder)


def readable_records(directory: Path) -> dict[Path, dict[str, Any]]:
    """What each checkpoint of a directory says of itself, without a look at its other files."""
    records = {}
    for folder in _places(directory):
        with contextlib.suppress(CheckpointError):  # damaged: whoever loads is told
            record = _read_record(folder)
            if record["format"] <= FORMAT:
                records[folder] = record
    return records


def _places(directory: Path) -> dict[Path, int]:
    """Every folder that may be a checkpoint, and its step; one that was being replaced if the new
    one has not come."""
    if not directory.is_dir():
        return {}
    found = {path: _step_of(path.name) for path in directory.iterdir() if _is_named(path)}
    for path in directory.iterdir():
        match = BESIDE.fullmatch(path.name)
        if match and match[3] == "old" and not (directory / match[1]).exists():
            found[path] = _step_of(match[1])
    return dict(sorted(found.items(), key=lambda item: item[1]))


def _is_named(path: Path) -> bool:
    return _NAME.fullmatch(path.name) is not None and path.is_dir()


def _step_of(name: str) -> int:
    return int(name.removeprefix("step-"))


def _name_of(folder: Path) -> str:
    match = BESIDE.fullmatch(folder.name)
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
    """``run.json``, if it is whole and belongs to this folder."""
    try:
        text = read_plain(folder / RUN)
    except FileNotFoundError:
        raise CheckpointError(f"{folder} is damaged: {RUN} is missing") from None
    except OSError as error:
        raise CheckpointError(f"{folder}: {RUN} could not be read: {error}") from error
    seal = _SEAL.match(text)
    if seal is None or _digest_of_record(text, seal[1]) != seal[1].decode():
        raise CheckpointError(f"{folder} is damaged: {RUN} is not as it was written")
    record = _checked_record(folder, text)
    # Under a name of another kind somebody has copied it on purpose.
    named = _NAME.fullmatch(_name_of(folder))
    if named and record["format"] <= FORMAT and record["step"] != int(named[1]):
        raise CheckpointError(
            f"{folder} is damaged: its {RUN} is that of step {record['step']}, from another folder"
        )
    return record


def _checked_record(folder: Path, text: bytes) -> dict[str, Any]:
    """The words of ``run.json``, whose digest is right: somebody may have made them up."""
    try:
        record: Any = parse_json(text)
        known = record.get("format") if isinstance(record, dict) else None
        if type(known) is not int or not 0 < known < _FORMATS:
            raise ValueError("it does not say of what format it is")
        if known <= FORMAT:
            check_stored(record)
    except ValueError as error:
        raise CheckpointError(f"{folder} is damaged: {RUN} cannot be used: {error}") from error
    return dict(record)


def _digest_of_record(text: bytes, seal: bytes) -> str:
    return hashlib.sha256(text.replace(seal, _NO_SEAL.encode(), 1)).hexdigest()


def _check_seal(path: Path, expected: Seal) -> None:
    folder, name = path.parent, path.name
    try:
        came = digest_file(path, expected.size)
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


def _write_record(path: Path, record: Mapping[str, object]) -> None:
    text = json.dumps({"sha256": _NO_SEAL, **record}, indent=2, allow_nan=False).encode() + b"\n"
    if len(text) > RECORD_BYTES:
        raise ValueError(
            f"what is saved beside tensors takes {len(text):,} bytes: expected {RECORD_BYTES:,} at "
            f"most. Keep large things out of extra"
        )
    seal = hashlib.sha256(text).hexdigest()
    with path.open("xb") as file:
        file.write(text.replace(_NO_SEAL.encode(), seal.encode(), 1))
        file.flush()
        os.fsync(file.fileno())


def _put_in_place(aside: Path, folder: Path, record: Mapping[str, object], old: Path) -> None:
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
    os.rename(folder, old)
    os.rename(aside, folder)
    shutil.rmtree(old)


def _run_of(folder: Path) -> object:
    """Which run wrote a checkpoint; None if that cannot be read."""
    try:
        return _read_record(folder).get("run")
    except CheckpointError:
        return None


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
