"""Writes files into folders that others may write to: whole, in place of our own, through no link.

Note: below the folder that was named
-------------------------------------
`aside_of` is how every file gets into a folder that we did not create. The user names a folder, by
links perhaps; below it no part of a path may be one. Each part is opened from the descriptor of the
one before, and names are used with that descriptor, so that a folder that is exchanged for a link
meanwhile leads nowhere.

A reader finds either the old file or the new one, whole, as it is written under another name and
renamed. What is replaced is a regular file; a link, a FIFO or a device was never ours.
"""

from __future__ import annotations

import errno
import os
import stat
import uuid
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, BinaryIO

__all__ = ["aside_of", "open_folder", "replace_file", "write_whole"]

_FOLDER = os.O_PATH | os.O_DIRECTORY | os.O_CLOEXEC
_NEW = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC


@contextmanager
def open_folder(path: Path, below: Path | None = None, *, make: bool = False) -> Iterator[int]:
    """Yield a descriptor of a folder, for names in it.

    Args:
        path: path of the folder.
        below: the folder that the user has named; None if it is ``path``. Links lead up to it, and
            none from there on.
        make: whether to make what is missing below it.

    Raises:
        OSError: a part of the path is a link or no folder, or cannot be opened.
    """
    folder = os.open(below or path, _FOLDER)
    try:
        for part in path.relative_to(below or path).parts:
            if make:
                with suppress(FileExistsError):
                    os.mkdir(part, dir_fd=folder)
            if part == ".." or stat.S_ISLNK(os.lstat(part, dir_fd=folder).st_mode):
                words = f"expected folders of its own, got the link {part}"
                raise OSError(errno.EINVAL, words, str(path))
            inner = os.open(part, _FOLDER | os.O_NOFOLLOW, dir_fd=folder)
            os.close(folder)
            folder = inner
        yield folder
    finally:
        os.close(folder)


@contextmanager
def aside_of(path: Path, *, below: Path | None = None, new: bool = False) -> Iterator[BinaryIO]:
    """Yield a new file that gets this path when all is written, or leaves nothing behind.

    Args:
        path: path of the file.
        below: as for `open_folder`; folders between it and the file are made.
        new: whether nothing may be replaced.

    Raises:
        FileExistsError: the path is a link, a folder or a device, or with ``new`` anything at all.
        OSError: the file cannot be written; what was there before is unchanged.
    """
    with open_folder(path.parent, below, make=True) as folder:
        _check_replaceable(path, folder, new=new)
        # In the same folder: a rename is atomic only within one file system.
        aside = f".onefold-{uuid.uuid4().hex}.part"
        try:
            with os.fdopen(os.open(aside, _NEW, 0o666, dir_fd=folder), "wb") as file:
                yield file
            # After the file is closed, so that everything is written by then. A name that must be
            # new is taken first, as a rename replaces whatever is there.
            _check_replaceable(path, folder, new=new)
            if new:
                os.close(os.open(path.name, _NEW, 0o666, dir_fd=folder))
            os.replace(aside, path.name, src_dir_fd=folder, dst_dir_fd=folder)
        finally:
            # After the rename nothing has this name; after an error the half-written file has.
            with suppress(FileNotFoundError):
                os.unlink(aside, dir_fd=folder)


def _check_replaceable(path: Path, folder: int, *, new: bool) -> None:
    with suppress(FileNotFoundError):
        kind = os.lstat(path.name, dir_fd=folder).st_mode
        if new or not stat.S_ISREG(kind):
            came = "a link" if stat.S_ISLNK(kind) else "a file" if stat.S_ISREG(kind) else "no file"
            words = f"expected {'a free name' if new else 'a file'}, got {came}: remove it"
            raise FileExistsError(errno.EEXIST, words, str(path))


def replace_file(path: Path, text: str) -> None:
    """Replace a file by a new one with this text and the old one's permissions."""
    with aside_of(path) as file:
        with suppress(FileNotFoundError):
            os.fchmod(file.fileno(), stat.S_IMODE(os.lstat(path).st_mode) & 0o666)
        file.write(text.encode())


def write_whole(path: Path, content: bytes, *, sync: bool = True, **where: Any) -> None:
    """Write a file aside, and move it to its path when it is whole.

    Args:
        path: path of the file.
        content: everything that it will hold.
        sync: whether it must be on the disk before it replaces what was there.
        where: ``below`` and ``new``; these and the errors are those of `aside_of`.
    """
    with aside_of(path, **where) as file:
        file.write(content)
        # A rename may reach the disk before the bytes do: after a power failure the name would
        # stand for an empty file, and the old one would be gone.
        if sync:
            file.flush()
            os.fsync(file.fileno())
