"""Finds the pictures below a folder."""

from __future__ import annotations

import errno
import stat
from collections.abc import Iterator
from pathlib import Path

from onefold.data.bad import BadFile, readable
from onefold.data.decoding import is_picture
from onefold.errors import DataError

__all__ = ["picture_paths", "require_folder", "visible_folders"]

_DEEPEST = 64
"""Folders within each other; deeper ones would end in a RecursionError."""
_NOTHING_THERE = frozenset({errno.ENOENT, errno.ENOTDIR, errno.ELOOP})
"""Errors of looking at a link that leads nowhere, or to itself."""


def require_folder(path: Path, expected: str) -> None:
    """Refuse a path that is not a folder.

    Args:
        path: what ``--data`` names.
        expected: what should be there, in words.

    Raises:
        DataError: the path does not exist, or is not a folder.
    """
    if path.is_dir():
        return
    nothing = "there is no such folder" + ("" if path.is_absolute() else f" in {Path.cwd()}")
    came = "this is a file" if path.exists() else nothing
    raise DataError(f"--data {readable(path)}: expected {expected}; {came}")


def picture_paths(folder: Path, bad: list[BadFile]) -> list[Path]:
    """Find all pictures below a folder, in the order of their paths; hidden ones are left out.

    A folder that can be reached in several ways, by links, is looked through once.

    Args:
        folder: folder to look through.
        bad: list to which folders that cannot be read, or lie too deep, are added.
    """
    # A file system lists in an order of its own, and the position of a picture seeds its
    # augmentation and decides whether it is held out.
    return sorted(_below(folder, bad, set(), _DEEPEST))


def visible_folders(directory: Path) -> list[Path]:
    """List the folders of a folder, and links to folders, by name; hidden ones are left out.

    Raises:
        DataError: the folder may not be read or searched.
    """
    try:
        return sorted(path for path in directory.iterdir() if _is_visible_folder(path))
    except OSError as error:
        raise DataError(
            f"{readable(Path(error.filename or directory))}: expected a folder that can be looked "
            f"through, got {error.strerror}"
        ) from error


def _is_visible_folder(path: Path) -> bool:
    """Whether a path is a folder, or a link to one, and is not hidden.

    Raises:
        OSError: that cannot be seen, as in a folder that may be read and not searched.
    """
    if path.name.startswith("."):
        return False
    # Not is_dir: it raises as well, or returns False without a word, by the version of Python.
    try:
        return stat.S_ISDIR(path.stat().st_mode)
    except OSError as error:
        if error.errno in _NOTHING_THERE:
            return False
        raise


def _below(
    folder: Path, bad: list[BadFile], seen: set[tuple[int, int]], deeper: int
) -> Iterator[Path]:
    """Yield the pictures of a folder and of those within it, following links."""
    try:
        # By number, not by name: a link to a folder above would otherwise be followed for ever.
        status = folder.stat()
        identity = (status.st_dev, status.st_ino)
        if identity in seen:
            return
        seen.add(identity)
        # Of two links to one folder the first by name is followed, on every machine.
        entries = sorted(folder.iterdir())
    except OSError as error:
        bad.append(BadFile(folder, f"expected a folder that can be read, got {error.strerror}"))
        return
    for path in entries:
        try:
            within = _is_visible_folder(path)
        except OSError as error:
            bad.append(BadFile(path, f"expected a file or folder, got {error.strerror}"))
            continue
        if within:
            if deeper:
                yield from _below(path, bad, seen, deeper - 1)
            else:
                bad.append(BadFile(path, f"expected folders at most {_DEEPEST} deep"))
        # A link that leads nowhere is yielded too, so that reading reports it; dropped here, it
        # would be missing without a word.
        elif is_picture(path) and (path.is_file() or path.is_symlink()):
            yield path
