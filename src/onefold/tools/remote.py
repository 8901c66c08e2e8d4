"""Keeps the checkpoints of a run in object storage (``--checkpoint s3://bucket/run``).

The run works in a private folder of this machine, its *copy*, exactly as in a folder that the user
names. Before it looks for a checkpoint there, `fetch` downloads the newest one. Afterwards
`RemoteCheckpoints` uploads each complete checkpoint and the record in the background. Only the lead
does any of this.

Note: what the storage contains
-------------------------------
A checkpoint is ``step-STEP-SERIAL-RUN-DIGEST/``, with the digest of its ``run.json``. So a name
always refers to the same contents: an interrupted upload is repeated under its name, and damages
nothing that is complete. ``run.json`` is written last, when the size of every other object is
right. A folder without it is not a checkpoint, and is deleted after the next upload. Each folder
has its own copy of the record, ``run.record``.

Note: which copy counts
-----------------------
The storage, unless the copy is ahead of it: then its last upload failed, and is repeated. A copy of
another run, or of checkpoints that were deleted from the storage, is an error.

Note: two runs with one URL
---------------------------
Object storage has no locks. Runs on one machine meet at the lock of their copy. On several
machines, each upload first looks for checkpoints that appeared during this run without having been
written by it. If there are any, another run saves there, and this one ends with an error. The
checkpoints of both stay undamaged, because their names differ.
"""

from __future__ import annotations

import errno
import hashlib
import logging
import math
import re
import shutil
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

import fsspec

from onefold.checkpoint.folder import find_checkpoint, open_checkpoint, readable_records
from onefold.checkpoint.manifest import RUN, check_stored, superseded
from onefold.checkpoint.saving import LeadWork
from onefold.core.options import RECORD_FILE
from onefold.errors import CheckpointError, LaunchError
from onefold.launcher.membership import at_good_end
from onefold.session.run import RunSetup, RunView
from onefold.step.hook import Hook, ScriptCall, Surrounds
from onefold.system.background import Background
from onefold.system.folder_lock import lock_of_checkpoints
from onefold.system.safe_files import RECORD_BYTES, parse_json, read_plain
from onefold.system.words import listed, message_of

__all__ = ["ObjectStorage", "RemoteCheckpoints", "fetch", "prepare"]

_log = logging.getLogger("onefold")
_Value = TypeVar("_Value")

_FOLDER = re.compile(r"step-\d{8,19}-\d{10,19}-[0-9a-f]{16}-[0-9a-f]{32}")
_STORED = ".stored"
"""File in a copy of which the storage has, or had, a checkpoint."""
_FETCHED = ".fetched"
"""Folder in a copy for unchecked downloads."""
_FINAL = (PermissionError, FileNotFoundError, NotImplementedError, CheckpointError)
"""Errors before training that no repetition mends."""
_FULL = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)
"""Numbers of the errors of a full disk."""
_MOST_PAUSE_S = 15.0
_START_LIMIT_S = 30.0
_UPLOAD_LIMIT_S = 600.0
"""Time for which failed requests are repeated, in seconds: before training, and for an upload."""


def _digest(content: bytes) -> str:
    return hashlib.sha256(content).hexdigest()[:32]


def _name(text: bytes) -> str:
    """Return the name in the storage of the checkpoint with this ``run.json``."""
    run = parse_json(text)
    of_run = _digest(run["run"].encode(errors="replace"))[:16]
    return f"step-{run['step']:08d}-{run['serial']:010d}-{of_run}-{_digest(text)}"


def _age(name: str) -> tuple[int, int]:
    return int(name.split("-")[2]), int(name.split("-")[1])


def _run(name: str) -> str:
    return name.split("-")[3]


class ObjectStorage:
    """The checkpoints at a URL of fsspec."""

    def __init__(self, url: str) -> None:
        self.url = url
        self._files, root = fsspec.core.url_to_fs(url)
        self._root = root.rstrip("/")
        self._sizes: dict[str, int] = {}
        """Size of each object in bytes, by its name below the URL."""
        self._known: set[str] = set()
        """Checkpoints that were there before this run, or that it has uploaded."""

    def open(self) -> None:
        """Check that objects can be listed, written and deleted."""
        self._write(".onefold", b"")
        self._known.update(self.complete())
        self._files.rm_file(f"{self._root}/.onefold")

    def complete(self) -> list[str]:
        """List the storage; return the names of complete checkpoints, the newest first."""
        self._files.invalidate_cache()
        try:
            found = self._files.find(self._root, detail=True)
        except FileNotFoundError:
            found = {}  # some storages have no empty folders
        self._sizes = {p.removeprefix(f"{self._root}/"): each["size"] for p, each in found.items()}
        names = (each.removesuffix(f"/{RUN}") for each in self._sizes if each.endswith(f"/{RUN}"))
        return sorted(filter(_FOLDER.fullmatch, names), key=_age, reverse=True)

    def download(self, name: str, folder: Path) -> None:
        """Download a checkpoint into a new folder, and its record; check every byte.

        Raises:
            CheckpointError: the checkpoint is damaged.
        """
        shutil.rmtree(folder.parent, ignore_errors=True)
        folder.mkdir(parents=True)
        try:
            self._get(name, RUN, folder, most_bytes=RECORD_BYTES)
            for run in readable_records(folder.parent).values():
                for file, seal in run["files"].items():
                    self._get(name, file, folder, most_bytes=seal["size"])
            open_checkpoint(folder)
            if f"{name}/{RECORD_FILE}" in self._sizes:
                self._get(name, RECORD_FILE, folder.parent)
        except BaseException as error:
            shutil.rmtree(folder.parent)
            if isinstance(error, CheckpointError):
                text = str(error).replace(str(folder), f"{self.url}/{name}")
                raise CheckpointError(text) from None
            raise

    def upload(self, folder: Path, record: Path | None) -> None:
        """Upload a checkpoint and the record, then delete what its rule does not keep.

        Raises:
            LaunchError: another run saves to the same URL.
            Exception: any error of the storage.
        """
        text = read_plain(folder / RUN)
        name, run = _name(text), parse_json(text)
        if strange := set(self.complete()) - self._known - {name}:
            raise LaunchError(
                f"another run saves to {self.url}: {listed(sorted(strange))} appeared during this "
                f"run. This run ends; its last checkpoint is {folder}. Give each run its own URL"
            )
        self._known.add(name)
        for file, seal in run["files"].items():
            if self._sizes.get(f"{name}/{file}") != seal["size"]:
                self._make_parent(f"{name}/{file}")
                self._files.put_file(str(folder / file), f"{self._root}/{name}/{file}")
                self._check_size(f"{name}/{file}", seal["size"])
        if record is not None and record.exists():
            self._write(f"{name}/{RECORD_FILE}", record.read_bytes())
        # A later checkpoint of this step may have replaced the folder meanwhile.
        if read_plain(folder / RUN) != text:
            raise FileNotFoundError(f"{folder} was replaced during its upload")
        self._write(f"{name}/{RUN}", text)
        try:
            self._prune(run)
        except Exception as error:
            _log.warning("%s: old checkpoints could not be deleted: %s", self.url, _words(error))

    def _prune(self, run: dict[str, Any]) -> None:
        names, own = self.complete(), {}
        for name in names:
            with suppress(ValueError):  # invalid ones are kept
                each = parse_json(self._files.cat_file(f"{self._root}/{name}/{RUN}"))
                check_stored(each)
                if each["run"] == run["run"]:
                    own[name] = each
        gone = [] if run["keep"] is None else superseded(own, run["keep"])
        for name in gone:
            self._files.rm_file(f"{self._root}/{name}/{RUN}")  # first: see the note at the top
        folders = {each.partition("/")[0] for each in self._sizes} - {*names} | {*gone}
        for name in filter(_FOLDER.fullmatch, folders):
            self._files.rm(f"{self._root}/{name}", recursive=True)

    def _get(self, name: str, file: str, folder: Path, most_bytes: float = math.inf) -> None:
        # Compare sizes first: a forged object may be larger than the disk.
        if self._sizes.get(f"{name}/{file}", math.inf) <= most_bytes:
            self._files.get_file(f"{self._root}/{name}/{file}", str(folder / file))

    def _write(self, name: str, content: bytes) -> None:
        self._make_parent(name)
        self._files.pipe_file(f"{self._root}/{name}", content)
        self._check_size(name, len(content))

    def _make_parent(self, name: str) -> None:
        # Object stores have no folders, and would create a bucket.
        if self._files.root_marker:
            self._files.makedirs(f"{self._root}/{name}".rpartition("/")[0], exist_ok=True)

    def _check_size(self, name: str, size: int) -> None:
        self._files.invalidate_cache()
        if (came := self._files.info(f"{self._root}/{name}")["size"]) != size:
            raise OSError(errno.EIO, f"{name} has {came} bytes, but {size} were uploaded")


def _words(error: BaseException) -> str:
    return f"{type(error).__name__}: {message_of(error)}"


def _repeated(
    request: Callable[[], _Value], what: str, limit_s: float, *final: type[Exception]
) -> _Value:
    """Make a request, and repeat it with growing pauses while it fails.

    Args:
        request: the request.
        what: description of the request, for a warning.
        limit_s: time for repetitions, in seconds.
        final: errors that no repetition mends.
    """
    end_s, pause_s = time.monotonic() + limit_s, 1.0
    while True:
        try:
            return request()
        except Exception as error:
            full = isinstance(error, OSError) and error.errno in _FULL
            if full or isinstance(error, final) or time.monotonic() + pause_s > end_s:
                raise
            if pause_s == 1.0:
                _log.warning("%s failed and is repeated: %s", what, _words(error))
        time.sleep(pause_s)
        pause_s = min(2 * pause_s, _MOST_PAUSE_S)


def fetch(storage: ObjectStorage, copy: Path, count: int = 1) -> Path | None:
    """Download the newest checkpoints of a storage, unless the copy on this machine is ahead.

    Args:
        storage: the storage.
        copy: folder of the copy, which no other process uses.
        count: number of undamaged checkpoints that the copy must have, if there are so many.

    Returns:
        The folder of a checkpoint that the storage lacks; None if the copy is not ahead.

    Raises:
        LaunchError: the storage cannot be used, or the copy belongs to another run.
        CheckpointError: all checkpoints of the storage are damaged.
    """

    def request(call: Callable[[], _Value]) -> _Value:
        try:
            return _repeated(call, f"access to {storage.url}", _START_LIMIT_S, *_FINAL)
        except CheckpointError:
            raise
        except Exception as error:
            raise LaunchError(
                f"checkpoints cannot be kept in {storage.url}: {_words(error)}. Check the URL, the "
                f"network, the disk of this machine ({copy}), and the credentials, which must "
                f"allow listing, reading, writing and deleting; training has not started"
            ) from None

    request(storage.open)
    names = request(storage.complete)
    own = [_name(read_plain(folder / RUN)) for folder in readable_records(copy)]
    newest = max(own, key=_age, default="")
    if own and (_run(newest) != _run(names[0]) if names else (copy / _STORED).exists()):
        raise LaunchError(
            f"{copy} has checkpoints of a run that {storage.url} does not contain. Remove this "
            f"folder to use the storage alone, or choose another URL"
        )
    if own and (not names or _age(newest) > _age(names[0])):
        return find_checkpoint(copy).folder
    good, damaged = 0, []
    for name in names:
        if name not in own:
            new = copy / _FETCHED / f"step-{_age(name)[1]:08d}"
            try:
                request(partial(storage.download, name, new))
            except CheckpointError as error:
                damaged.append(str(error))
                continue
            _put_in_place(new, copy, with_record=not good)
        good += 1
        if good == count:
            break
    if damaged and not good:
        raise CheckpointError(f"no checkpoint in {storage.url} is usable: {'; '.join(damaged)}")
    for text in damaged:
        _log.warning("%s; using an older one instead", text)
    return None


def _put_in_place(new: Path, copy: Path, *, with_record: bool) -> None:
    (copy / _STORED).touch()
    # The record first: it also fits the older checkpoints.
    if with_record:
        (copy / RECORD_FILE).unlink(missing_ok=True)
        if (record := new.parent / RECORD_FILE).exists():
            record.rename(copy / RECORD_FILE)
    # If the process is killed between these two lines, the storage still has the checkpoint.
    shutil.rmtree(copy / new.name, ignore_errors=True)
    new.rename(copy / new.name)


def prepare(start: RunSetup) -> Callable[[RunView], Hook | None]:
    """Fetch the newest checkpoint on the lead, while the other devices wait."""

    def begin(run: RunView) -> Hook | None:
        if run.devices.trainer > 0:
            return None  # another tool refuses it
        lead = LeadWork(run.engine, run.devices, run.engine.context.settings.timeout_s)
        with run.telling_others():
            work = partial(_fetched, run) if lead.is_here else None
            found = lead.do("fetching checkpoints", work)
        return None if found is None else RemoteCheckpoints(run, *found)

    return begin


def _fetched(run: RunView) -> tuple[ObjectStorage, Path | None]:
    options = run.context.options
    copy, storage = Path(options.checkpoint), ObjectStorage(options.remote)
    lock = lock_of_checkpoints(copy)
    lock.acquire(options.grace_period_s)
    try:
        return storage, fetch(storage, copy, 1 + run.context.leave_out)
    finally:
        lock.let_go()


class RemoteCheckpoints(Hook):
    """Uploads the checkpoints of a run, on the lead.

    Args:
        run: the run.
        storage: where to upload them.
        ahead: checkpoint that the storage lacks, if any.
    """

    def __init__(self, run: RunView, storage: ObjectStorage, ahead: Path | None) -> None:
        options = run.context.options
        self._storage, self._copy = storage, Path(options.checkpoint)
        # A record that the user keeps elsewhere stays there.
        self._record = None if options.record else self._copy / RECORD_FILE
        self._uploading = Background("uploading a checkpoint")
        self._lock = threading.Lock()
        self._next = ahead
        """Newest checkpoint that is not uploaded yet, if any."""
        self._busy = False
        run.checkpoints.on_written(self._note)
        # Called after everything that is registered while the hooks of the run are made.
        at_good_end(lambda: at_good_end(self._finish))
        self._start()

    def _note(self, folder: Path) -> None:
        """Upload a checkpoint that is complete; called in the thread that wrote it."""
        if folder.parent == self._copy:
            self._next = folder
            self._start()

    def _start(self) -> None:
        with self._lock:
            if self._next is not None and not self._busy:
                self._busy = True
                self._uploading.start(self._upload)

    def around(self, asked: ScriptCall) -> Surrounds:
        """Raise if another run saves to the same URL; failed uploads only cause a warning."""
        try:
            with self._lock:
                self._uploading.wait(limit_s=0)
        except CheckpointError as error:
            _log.warning("%s. The next checkpoint is uploaded as usual", error)
        return None

    def _finish(self) -> None:
        """Wait until the last checkpoint is uploaded, and raise if it cannot be."""
        self._start()
        self._uploading.wait()

    def _upload(self) -> None:
        """Upload the newest checkpoint until there is no newer one.

        Raises:
            CheckpointError: an upload still fails after `_UPLOAD_LIMIT_S`.
            LaunchError: another run saves to the same URL.
        """
        url = self._storage.url
        try:
            while self._busy:
                _repeated(self._upload_newest, f"uploading to {url}", _UPLOAD_LIMIT_S, LaunchError)
                with self._lock:
                    self._busy = self._next is not None
        except LaunchError:
            raise  # and stay busy, so that nothing is uploaded any more
        except Exception as error:
            with self._lock:
                self._busy = False
            raise CheckpointError(
                f"{self._next} could not be uploaded to {url}: {_words(error)}. It is complete: "
                f"the same command, on this machine, resumes from it and uploads it"
            ) from None

    def _upload_newest(self) -> None:
        folder = self._next
        assert folder is not None
        try:
            self._storage.upload(folder, self._record)
        except Exception:
            if folder is self._next:
                raise
            return  # a newer one is complete, and may have replaced this one
        (self._copy / _STORED).touch()
        with self._lock:
            if self._next is folder:
                self._next = None
