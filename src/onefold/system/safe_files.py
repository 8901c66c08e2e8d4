"""Creates files that belong to this run, never in the place of others, and reads any with care.

Note: what lies under a name
----------------------------
In a folder that others may write to, there may be a symbolic link, a pipe, or a file that was never
ours under any name. So a new file is created with O_EXCL, which follows no link; a file that
replaces an older one is written aside and renamed, over a regular file alone; and a folder is
removed only as long as it is the one that was created, by its inode number. Asking what a name
stands for and opening it afterwards would not do, as somebody may exchange it in between: what is
opened is checked by its descriptor.

Note: what is read
------------------
`read_plain` reads files that anybody may have put in place: regular ones only, and never without a
limit. A link could lead anywhere, opening a FIFO would wait, a device has no end, and JSON may be
nested until Python gives up. Each of these ends here, in an `OSError` or a `ValueError`.
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
"""In bytes: the room in the address of a Unix socket, less what multiprocessing appends to the path
of the temporary folder."""

_MARK = ".onefold-boot"
"""A file in a private folder, which its process has locked for as long as it lives. It holds what
`_boot` returns."""

NO_LOCKS = (errno.ENOSYS, errno.ENOLCK, errno.EOPNOTSUPP, errno.EINVAL)
"""The errors by which a file system says that it has no locks."""

_NEW = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC
# O_NONBLOCK, or opening a FIFO would wait for its other end; O_NOCTTY, or a terminal would become
# ours, and its Ctrl-C with it.
_LOOKING = os.O_NONBLOCK | os.O_NOCTTY | os.O_CLOEXEC


class PrivateFolder:
    """A new folder in the temporary directory that only its owner can look into.

    A cleaner of temporary files leaves it alone if it respects locks, as systemd-tmpfiles does; if
    the folder is removed all the same, leaving the block is not an error.

    Args:
        prefix: how the folder's name begins.
    """

    def __init__(self, prefix: str = "onefold-") -> None:
        _sweep(Path(tempfile.gettempdir()))
        self.path = Path(tempfile.mkdtemp(prefix=prefix))
        self._descriptor = os.open(self.path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        # Shared, so that nobody else who merely reads is shut out; some file systems have no locks.
        with suppress(OSError):
            fcntl.flock(self._descriptor, fcntl.LOCK_SH | fcntl.LOCK_NB)
            # Only now: a sweep, which looks for this name, finds the lock with it, or neither.
            (self.path / _MARK).write_bytes(_boot())

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.remove()

    def is_there(self) -> bool:
        """Whether the folder under this name is still the one that was created."""
        try:
            found = os.lstat(self.path)
        except OSError:
            return False
        # While the descriptor is open the inode number cannot be given to another folder.
        return os.path.samestat(found, os.fstat(self._descriptor))

    def remove(self) -> None:
        """Remove the folder with everything in it."""
        if self.is_there():
            shutil.rmtree(self.path, ignore_errors=True)
        os.close(self._descriptor)

    def keep(self) -> None:
        """Leave the folder to the user, and let go of it."""
        # Before the lock goes with the descriptor: a folder without a mark is nobody's to remove.
        if self.is_there():
            (self.path / _MARK).unlink(missing_ok=True)
        os.close(self._descriptor)


def _boot() -> bytes:
    """What is alike for processes of this host, and for no others, until it is started again."""
    return Path("/proc/sys/kernel/random/boot_id").read_bytes()


def _sweep(directory: Path) -> None:
    """Remove private folders whose process was killed, so that it could not do so itself."""
    for path in directory.glob("onefold-*"):
        # Whatever is not as it must be is left alone: it is somebody else's, or in use.
        with suppress(OSError), ExitStack() as leaving:
            folder = os.open(path, _LOOKING | os.O_NOFOLLOW | os.O_DIRECTORY)
            leaving.callback(os.close, folder)
            there = os.fstat(folder)
            is_ours = there.st_uid == os.geteuid() and stat.S_IMODE(there.st_mode) == stat.S_IRWXU
            # On another host, or before a restart, the lock would say nothing of the process.
            if is_ours and read_plain(path / _MARK) == _boot():
                fcntl.flock(folder, fcntl.LOCK_EX | fcntl.LOCK_NB)
                if os.path.samestat(os.lstat(path), there):
                    shutil.rmtree(path, ignore_errors=True)


def gather_sockets_in(folder: str) -> None:
    """Have processes that this one makes by `multiprocessing` put their sockets into a folder.

    They remove them when they end, unless they are killed. Where the folder's path would make those
    of sockets too long, they stay where they would be.
    """
    if len(os.fsencode(folder)) > LONGEST_TEMPORARY_PATH:
        return
    before, tempfile.tempdir = tempfile.tempdir, folder
    try:
        # Made at the first call, and handed on to all processes.
        multiprocessing.util.get_temp_dir()
    finally:
        tempfile.tempdir = before


def memory_file(label: str = "onefold") -> int:
    """Open a new file in memory that has no name, and return its descriptor.

    ``/proc`` shows the label. Where the kernel, or a container by seccomp, knows no memfd it is a
    file of ``/dev/shm``.
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
        FileExistsError: the name is taken, even if by a link to nowhere.
    """
    return os.open(path, _NEW | (os.O_APPEND if append else 0), 0o666)


def write_all(descriptor: int, content: bytes | memoryview) -> None:
    """Write everything to an open file: a single write takes 2 GiB at most, and may take less."""
    while content:
        content = content[os.write(descriptor, content) :]


def local_path(name: str, path: str | os.PathLike[str]) -> Path:
    """Refuse an address of object storage or of the web, which would be taken for a folder.

    Args:
        name: what the user calls it.
        path: what the user gave.

    Raises:
        ValueError: it is an address.

    >>> local_path("--checkpoint", "runs/a")
    PosixPath('runs/a')
    """
    # A Path has lost one of the slashes.
    if re.match(r"[A-Za-z][A-Za-z0-9+.-]+:/", text := os.fspath(path)):
        raise ValueError(
            f"expected {name} to be a local folder or file, got {text}: onefold reads and writes "
            f"local files alone. Mount the storage, or copy the folder when the run has ended"
        )
    return Path(path)


def open_regular(path: Path, flags: int, mode: int = 0o666, *, follow: bool = False) -> int:
    """Open a regular file, or create it if ``flags`` say so, without waiting.

    Args:
        path: path of the file.
        flags: as for `os.open`.
        mode: permissions of a new file.
        follow: whether to follow links, as is right if the user has named a file to be read.

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
    # Asked of the descriptor: a path may be exchanged between a look at it and its opening.
    kind = os.fstat(descriptor).st_mode
    if not stat.S_ISREG(kind):
        os.close(descriptor)
        raise _not_plain(path, "a folder" if stat.S_ISDIR(kind) else "a FIFO or a device")
    return descriptor


def _not_plain(path: Path, came: str) -> OSError:
    return OSError(errno.EINVAL, f"expected a file, got {came}", str(path))


RECORD_BYTES = 64 << 20
"""The largest text file that is read whole: records and options."""

_DEEPEST = 200
"""How many lists and dicts may be nested in JSON; what onefold writes has far fewer."""


def open_plain(path: Path, *, follow: bool = False) -> BufferedReader:
    """Open a regular file for reading; arguments and errors are those of `open_regular`."""
    return os.fdopen(open_regular(path, os.O_RDONLY, follow=follow), "rb")


def read_plain(path: Path, limit_bytes: int = RECORD_BYTES) -> bytes:
    """Read all of a regular file.

    Raises:
        FileNotFoundError: the file does not exist.
        OSError: the path is not a regular file, or the file is larger than the limit.
    """
    with open_plain(path) as file:
        size = os.fstat(file.fileno()).st_size
        # One byte beyond the limit: the file may grow, or report a size of 0 as those in /proc do.
        content = file.read(limit_bytes + 1) if size <= limit_bytes else b""
    if max(size, len(content)) > limit_bytes:
        got = f"{size:,}" if size > limit_bytes else "more"  # it has grown, or claims no size
        raise OSError(errno.EFBIG, f"expected {limit_bytes:,} bytes at most, got {got}", str(path))
    return content


def parse_json(text: str | bytes) -> Any:
    """Parse a JSON text.

    Raises:
        ValueError: the text is not JSON, is nested too deeply, or has a number of thousands of
            digits.
    """
    try:
        value = json.loads(text)
    except RecursionError:
        raise ValueError("it is nested too deeply") from None
    if nested_too_deeply(value):
        raise ValueError("it is nested too deeply")
    return value


def json_text(value: Any, indent: int | None = None) -> str:
    """Write a value as JSON that every reader takes.

    Numbers that are not finite are null, bytes are their number, tensors and arrays their dtype and
    shape.

    >>> json_text({"loss": float("nan"), "rows": b"abc"})
    '{"loss": null, "rows": 3}'
    """
    # The only control character that JSON leaves as it is.
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
    """Whether lists and dicts are nested more deeply than anything that onefold writes."""
    # Level by level, not by recursion, which is what such a value would exhaust.
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
        OSError: the file cannot be written, or is a link or no regular file.
    """
    # Opened for each line, so that a file that is moved away during the run is simply begun again.
    descriptor = open_regular(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT)
    with os.fdopen(descriptor, "a") as file:
        file.write(json.dumps(dict(record)) + "\n")


def read_record(folder: Path, name: str) -> list[dict[str, Any]]:
    """The lines of ``NAME.jsonl`` in a folder; none if the file does not exist."""
    path = folder / f"{name}.jsonl"
    return [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []
