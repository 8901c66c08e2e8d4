"""Creates files without overwriting others', and reads files of unknown origin safely.

Note: names in shared folders
-----------------------------
In a folder that others may write to, any name may be a symbolic link, a pipe, or a file of another
program. So a new file is created with O_EXCL, which does not follow links; a file that replaces an
older one is written aside and renamed, over a regular file only; and a folder is removed only while
it is still the one that was created, by its inode number. Checking a path before opening it would
not be safe, because another process may replace it in between, so the open descriptor is checked.

Note: reading files of unknown origin
-------------------------------------
`read_plain` reads files that another user may have created: only regular files, and only up to a
limit. A link could lead anywhere, opening a FIFO would block, a device has no end, and JSON may be
nested too deeply for Python. All these cases raise an `OSError` or a `ValueError`.
`system/whole_files.py` writes files.
"""

from __future__ import annotations

import errno
import fcntl
import json
import math
import multiprocessing.util
import os
import re
import shutil
import stat
import tempfile
from collections.abc import Mapping
from contextlib import ExitStack, suppress
from io import BufferedReader
from pathlib import Path
from typing import Any, Self

__all__ = [
    "LONGEST_TEMPORARY_PATH",
    "NO_LOCKS",
    "RECORD_BYTES",
    "PrivateFolder",
    "append_line",
    "create_file",
    "gather_sockets_in",
    "json_text",
    "local_path",
    "memory_file",
    "nested_too_deeply",
    "open_plain",
    "open_regular",
    "parse_json",
    "read_plain",
    "read_record",
    "write_all",
]


LONGEST_TEMPORARY_PATH = 107 - len("/pymp-12345678/listener-12345678")
"""Maximum length, in bytes, of the path of the temporary folder: the size of a Unix socket address
without the part that multiprocessing appends."""

_MARK = ".onefold-boot"
"""File in a private folder with the content of `_boot`. The folder's process holds a lock on the
folder for as long as it lives."""

NO_LOCKS = (errno.ENOSYS, errno.ENOLCK, errno.EOPNOTSUPP, errno.EINVAL)
"""Errors of file systems that do not support locks."""

_NEW = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC
# O_NONBLOCK, because opening a FIFO would wait for its other end. O_NOCTTY, because a terminal
# would become this process's controlling terminal, and send it Ctrl-C.
_LOOKING = os.O_NONBLOCK | os.O_NOCTTY | os.O_CLOEXEC


class PrivateFolder:
    """A new folder in the temporary directory that only its owner can read.

    Cleaners of temporary files that respect locks, such as systemd-tmpfiles, do not remove it. If
    it is removed anyway, leaving the block raises no error.

    Args:
        prefix: prefix of the folder's name.
    """

    def __init__(self, prefix: str = "onefold-") -> None:
        _sweep(Path(tempfile.gettempdir()))
        self.path = Path(tempfile.mkdtemp(prefix=prefix))
        self._descriptor = os.open(self.path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        # A shared lock does not block other readers. Some file systems do not support locks.
        with suppress(OSError):
            fcntl.flock(self._descriptor, fcntl.LOCK_SH | fcntl.LOCK_NB)
            # Write the mark after locking: a sweep looks for the mark, and must then see the lock.
            (self.path / _MARK).write_bytes(_boot())

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.remove()

    def is_there(self) -> bool:
        """Whether the folder at this path is still the one that was created."""
        try:
            found = os.lstat(self.path)
        except OSError:
            return False
        # While the descriptor is open, no other folder can have the same inode number.
        return os.path.samestat(found, os.fstat(self._descriptor))

    def remove(self) -> None:
        """Remove the folder with all its content."""
        if self.is_there():
            shutil.rmtree(self.path, ignore_errors=True)
        os.close(self._descriptor)

    def keep(self) -> None:
        """Leave the folder to the user, and release it."""
        # Remove the mark before closing releases the lock: a folder without a mark is never swept.
        if self.is_there():
            (self.path / _MARK).unlink(missing_ok=True)
        os.close(self._descriptor)


def _boot() -> bytes:
    """Return an id that all processes of this host share until the next boot."""
    return Path("/proc/sys/kernel/random/boot_id").read_bytes()


def _sweep(directory: Path) -> None:
    """Remove private folders of processes that were killed before they could remove them."""
    for path in directory.glob("onefold-*"):
        # Leave everything unexpected alone: it belongs to another user, or is in use.
        with suppress(OSError), ExitStack() as leaving:
            folder = os.open(path, _LOOKING | os.O_NOFOLLOW | os.O_DIRECTORY)
            leaving.callback(os.close, folder)
            there = os.fstat(folder)
            is_ours = there.st_uid == os.geteuid() and stat.S_IMODE(there.st_mode) == stat.S_IRWXU
            # The lock proves nothing about a process on another host, or before a reboot.
            if is_ours and read_plain(path / _MARK) == _boot():
                fcntl.flock(folder, fcntl.LOCK_EX | fcntl.LOCK_NB)
                if os.path.samestat(os.lstat(path), there):
                    shutil.rmtree(path, ignore_errors=True)


def gather_sockets_in(folder: str) -> None:
    """Make `multiprocessing` put the sockets of this process's children into a folder.

    The children remove the sockets when they end, unless they are killed. If the folder's path is
    too long for sockets, nothing changes.
    """
    if len(os.fsencode(folder)) > LONGEST_TEMPORARY_PATH:
        return
    before, tempfile.tempdir = tempfile.tempdir, folder
    try:
        # The first call creates the folder, which is then passed on to all processes.
        multiprocessing.util.get_temp_dir()
    finally:
        tempfile.tempdir = before


def memory_file(label: str = "onefold") -> int:
    """Open a new file in memory that has no name, and return its descriptor.

    ``/proc`` shows the label. If the kernel or a container (seccomp) does not allow memfd, the file
    is in ``/dev/shm``.
    """
    try:
        return os.memfd_create(label, os.MFD_CLOEXEC)
    except OSError as error:
        if error.errno not in (errno.ENOSYS, errno.EPERM, errno.EACCES):
            raise
    with tempfile.TemporaryFile(dir="/dev/shm") as file:
        return os.dup(file.fileno())


def create_file(path: Path, *, append: bool = False) -> int:
    """Create a file, and return its descriptor for writing.

    Raises:
        FileExistsError: the path exists, even as a dangling link.
    """
    return os.open(path, _NEW | (os.O_APPEND if append else 0), 0o666)


def write_all(descriptor: int, content: bytes | memoryview) -> None:
    """Write everything to an open file: one write accepts at most 2 GiB, and may write less."""
    while content:
        content = content[os.write(descriptor, content) :]


def local_path(name: str, path: str | os.PathLike[str]) -> Path:
    """Refuse URLs of object storage or the web, which would otherwise be taken for folders.

    Args:
        name: the user's name of the option or argument.
        path: the user's value.

    Raises:
        ValueError: the value is a URL.

    >>> local_path("--checkpoint", "runs/a")
    PosixPath('runs/a')
    """
    # pathlib collapses the two slashes of a URL into one.
    if re.match(r"[A-Za-z][A-Za-z0-9+.-]+:/", text := os.fspath(path)):
        raise ValueError(
            f"{name} must be a local folder or file, but got {text}. Mount the storage, or copy "
            f"the folder after the run"
        )
    return Path(path)


def open_regular(path: Path, flags: int, mode: int = 0o666, *, follow: bool = False) -> int:
    """Open a regular file without blocking, or create it if ``flags`` allow it.

    Args:
        path: path of the file.
        flags: as for `os.open`.
        mode: permissions of a new file.
        follow: whether to follow links; right for a file that the user chose to be read.

    Raises:
        FileNotFoundError: the file does not exist.
        OSError: the path is a link, a folder, a FIFO or a device, or cannot be opened.
    """
    try:
        descriptor = os.open(path, flags | _LOOKING | (0 if follow else os.O_NOFOLLOW), mode)
    except OSError as error:
        if error.errno == errno.ELOOP and not follow:
            raise _not_plain(path, "a link") from None
        if error.errno == errno.ENXIO:
            raise _not_plain(path, "a FIFO or a socket") from None
        raise
    # Check the descriptor, because the path may be replaced between a check and the opening.
    kind = os.fstat(descriptor).st_mode
    if not stat.S_ISREG(kind):
        os.close(descriptor)
        raise _not_plain(path, "a folder" if stat.S_ISDIR(kind) else "a FIFO or a device")
    return descriptor


def _not_plain(path: Path, came: str) -> OSError:
    return OSError(errno.EINVAL, f"expected a file, got {came}", str(path))


RECORD_BYTES = 64 << 20
"""Maximum size of text files that are read at once: records and options."""

_DEEPEST = 200
"""Maximum nesting of lists and dicts in JSON; onefold writes far less."""


def open_plain(path: Path, *, follow: bool = False) -> BufferedReader:
    """Open a regular file for reading; arguments and errors as for `open_regular`."""
    return os.fdopen(open_regular(path, os.O_RDONLY, follow=follow), "rb")


def read_plain(path: Path, limit_bytes: int = RECORD_BYTES) -> bytes:
    """Read a regular file completely.

    Raises:
        FileNotFoundError: the file does not exist.
        OSError: the path is not a regular file, or the file is larger than the limit.
    """
    with open_plain(path) as file:
        size = os.fstat(file.fileno()).st_size
        # Read one byte beyond the limit: the file may grow, or report a size of 0, as in /proc.
        content = file.read(limit_bytes + 1) if size <= limit_bytes else b""
    if max(size, len(content)) > limit_bytes:
        got = f"{size:,}" if size > limit_bytes else "more"  # it has grown, or reports no size
        raise OSError(errno.EFBIG, f"expected at most {limit_bytes:,} bytes, got {got}", str(path))
    return content


def parse_json(text: str | bytes) -> Any:
    """Parse JSON text.

    Raises:
        ValueError: the text is not JSON, is nested too deeply, or contains a number with thousands
            of digits.
    """
    try:
        value = json.loads(text)
    except RecursionError:
        raise ValueError("it is nested too deeply") from None
    if nested_too_deeply(value):
        raise ValueError("it is nested too deeply")
    return value


def json_text(value: Any, indent: int | None = None) -> str:
    """Convert a value to JSON that every reader accepts.

    Numbers that are not finite become null, bytes become their length, and tensors and arrays
    become their dtype and shape.

    >>> json_text({"loss": float("nan"), "rows": b"abc"})
    '{"loss": null, "rows": 3}'
    """
    # JSON escapes all control characters but this one.
    return json.dumps(_plain(value), allow_nan=False, indent=indent).replace("\x7f", r"\u007f")


def _plain(value: Any) -> Any:
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if isinstance(value, bytes):
        return len(value)
    if isinstance(value, list | tuple):
        return [_plain(each) for each in value]
    if isinstance(value, dict):
        return {name: _plain(each) for name, each in value.items()}
    if hasattr(value, "dtype"):
        return {"dtype": str(value.dtype), "shape": list(value.shape)}
    return value


def nested_too_deeply(value: object) -> bool:
    """Whether lists and dicts are nested more deeply than onefold ever writes."""
    # Level by level: recursion would fail on such a value.
    level = [value]
    for _ in range(_DEEPEST):
        level = [
            part
            for each in level
            if isinstance(each, list | dict)
            for part in (each.values() if isinstance(each, dict) else each)
        ]
        if not level:
            return False
    return True


def append_line(path: Path, record: Mapping[str, object]) -> None:
    """Append one line to a file, without following links.

    Raises:
        OSError: the file cannot be written, is a link, or is not a regular file.
    """
    # Open the file for each line, so that a new one is started if the user moves it during the run.
    descriptor = open_regular(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT)
    with os.fdopen(descriptor, "a") as file:
        file.write(json.dumps(dict(record)) + "\n")


def read_record(folder: Path, name: str) -> list[dict[str, Any]]:
    """Return the lines of ``NAME.jsonl`` in a folder; none if the file does not exist."""
    path = folder / f"{name}.jsonl"
    return [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []
