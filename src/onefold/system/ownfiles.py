"""Files and folders that are this run's own: made anew, and never in the place of somebody else's.

Note: what lies under a name
----------------------------
In a folder that others may write to, what lies under a name may be a symbolic link, a pipe, or a
file that was never ours. So a new file is made with O_EXCL, which follows no link; a file that
takes the place of an older one is written aside and renamed, which replaces a link and not what it
points to; and a folder is only removed while it is the one that was made, by its inode number.
"""

from __future__ import annotations

import errno
import fcntl
import os
import shutil
import stat
import tempfile
import uuid
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import BinaryIO, Self

__all__ = ["PrivateFolder", "aside_of", "create_file", "open_regular", "replace_file"]

_NEW = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC
_AS_A_LINK = frozenset({errno.ELOOP, errno.ENXIO})
"""What opening without following and without waiting says of a link, and of a pipe or socket."""


class PrivateFolder:
    """A new folder in the temporary directory that only its owner can look into.

    A cleaner of temporary files leaves it alone where it heeds locks, as systemd-tmpfiles does; if
    it is removed all the same, leaving the block is no error.

    Args:
        prefix: of its name.
    """

    def __init__(self, prefix: str = "onefold-") -> None:
        self.path = Path(tempfile.mkdtemp(prefix=prefix))
        self._descriptor = os.open(self.path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        with suppress(OSError):  # a file system without locks
            fcntl.flock(self._descriptor, fcntl.LOCK_SH | fcntl.LOCK_NB)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.remove()

    def is_there(self) -> bool:
        """Whether the folder of this name is still the one that was made."""
        try:
            found = os.lstat(self.path)
        except OSError:
            return False
        return os.path.samestat(found, os.fstat(self._descriptor))

    def remove(self) -> None:
        """Remove it with all that it holds."""
        if self.is_there():
            shutil.rmtree(self.path, ignore_errors=True)
        os.close(self._descriptor)

    def keep(self) -> None:
        """Leave it for the user."""
        os.close(self._descriptor)


def create_file(path: Path, *, append: bool = False) -> int:
    """The descriptor of a new file.

    Raises:
        FileExistsError: there is something of that name, be it a link to nowhere.
    """
    return os.open(path, _NEW | (os.O_APPEND if append else 0), 0o666)


@contextmanager
def aside_of(path: Path) -> Iterator[BinaryIO]:
    """A new file that takes the place of a path when all is written, or leaves nothing behind."""
    aside = path.with_name(f".onefold-{uuid.uuid4().hex}.part")
    try:
        with os.fdopen(create_file(aside), "wb") as file:
            yield file
        os.replace(aside, path)
    finally:
        aside.unlink(missing_ok=True)


def open_regular(path: Path, flags: int, mode: int = 0o666) -> int:
    """The descriptor of a file that is there, or that ``flags`` make; follows no link.

    Raises:
        ValueError: it is a link, a folder, a pipe or a device.
    """
    try:
        descriptor = os.open(
            path, flags | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_NOCTTY | os.O_CLOEXEC, mode
        )
    except OSError as error:
        if error.errno in _AS_A_LINK:
            raise _no_file(path) from None
        raise
    if not stat.S_ISREG(os.fstat(descriptor).st_mode):
        os.close(descriptor)
        raise _no_file(path)
    return descriptor


def replace_file(path: Path, text: str) -> None:
    """Write a file whole, in the place of what has its name; it keeps the mode of that."""
    with aside_of(path) as file:
        with suppress(FileNotFoundError):
            os.fchmod(file.fileno(), stat.S_IMODE(os.lstat(path).st_mode) & 0o666)
        file.write(text.encode())


def _no_file(path: Path) -> ValueError:
    return ValueError(
        f"{path}: expected a file, this is a link or something else: onefold writes through no "
        f"link; name the file itself"
    )
