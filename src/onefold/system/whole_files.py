"""Writes complete files into folders that others may write to, without following links.

Note: paths below the user's folder
-----------------------------------
Every file in a folder that onefold did not create is written through `aside_of`. The user's path to
that folder may contain links, but the part of the path below the folder may not. Each part is
opened relative to the descriptor of its parent, and names are used relative to that descriptor, so
that replacing a folder by a link in the meantime has no effect.

A reader sees either the complete old file or the complete new one, because the new file is written
under another name and renamed. Only a regular file is replaced: a link, a FIFO or a device cannot
be onefold's.
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
        below: folder that the user chose; None if it is ``path``. The path may contain links up to
            this folder, but not below it.
        make: whether to create missing folders below it.

    Raises:
        OSError: a part of the path is a link, is not a folder, or cannot be opened.
    """
    folder = os.open(below or path, _FOLDER)
    try:
        for part in path.relative_to(below or path).parts:
            if make:
                with suppress(FileExistsError):
                    os.mkdir(part, dir_fd=folder)
            if part == ".." or stat.S_ISLNK(os.lstat(part, dir_fd=folder).st_mode):
                words = f"links and .. are not followed below a folder, but got {part}"
                raise OSError(errno.EINVAL, words, str(path))
            inner = os.open(part, _FOLDER | os.O_NOFOLLOW, dir_fd=folder)
            os.close(folder)
            folder = inner
        yield folder
    finally:
        os.close(folder)


@contextmanager
def aside_of(path: Path, *, below: Path | None = None, new: bool = False) -> Iterator[BinaryIO]:
    """Yield a new file that is renamed to ``path`` when complete, and removed after an error.

    Args:
        path: path of the file.
        below: as for `open_folder`; missing folders between it and the file are created.
        new: whether the path must be unused.

    Raises:
        FileExistsError: the path is a link, a folder or a device, or with ``new`` anything at all.
        OSError: the file cannot be written; an existing file is unchanged.
    """
    with open_folder(path.parent, below, make=True) as folder:
        _check_replaceable(path, folder, new=new)
        # In the same folder, because a rename is atomic only within one file system.
        aside = f".onefold-{uuid.uuid4().hex}.part"
        try:
            with os.fdopen(os.open(aside, _NEW, 0o666, dir_fd=folder), "wb") as file:
                yield file
            # Close the file first, so that everything is written. With `new`, create the name
            # exclusively before the rename, which would replace any other file.
            _check_replaceable(path, folder, new=new)
            if new:
                os.close(os.open(path.name, _NEW, 0o666, dir_fd=folder))
            os.replace(aside, path.name, src_dir_fd=folder, dst_dir_fd=folder)
        finally:
            # After the rename this name is unused; after an error it is the incomplete file.
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
    """Replace a file by a new one with this text, keeping its permissions."""
    with aside_of(path) as file:
        with suppress(FileNotFoundError):
            os.fchmod(file.fileno(), stat.S_IMODE(os.lstat(path).st_mode) & 0o666)
        file.write(text.encode())


def write_whole(path: Path, content: bytes, *, sync: bool = True, **where: Any) -> None:
    """Write a complete file aside, then rename it to its path.

    Args:
        path: path of the file.
        content: complete content of the file.
        sync: whether the content must be on the disk before it replaces an existing file.
        where: ``below`` and ``new``; these and the errors are those of `aside_of`.
    """
    with aside_of(path, **where) as file:
        file.write(content)
        # The disk may store the rename before the bytes: after a power failure, the path would
        # then hold an empty file, and the old file would be lost.
        if sync:
            file.flush()
            os.fsync(file.fileno())
