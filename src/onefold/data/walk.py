"""Finds the pictures beneath a folder."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

from onefold.data.bad import BadFile, readable
from onefold.data.decoding import is_picture
from onefold.errors import DataError

__all__ = ["is_visible_folder", "picture_paths", "require_folder"]

_DEEPEST = 64
"""Folders within each other."""


def require_folder(path: Path, expected: str) -> None:
    """Refuse what is no folder.

    Args:
        path: what ``--data`` names.
        expected: in words.

    Raises:
        DataError: it is something else, or nothing.
    """
    if path.is_dir():
        return
    nothing = "there is no such folder" + ("" if path.is_absolute() else f" in {Path.cwd()}")
    came = "this is a file" if path.exists() else nothing
    raise DataError(f"--data {readable(path)}: expected {expected}; {came}")


def picture_paths(folder: Path, bad: list[BadFile]) -> list[Path]:
    """All pictures beneath a folder, in the order of their paths; hidden ones are left out.

    A folder to which several ways lead, by links, is looked through once.

    Args:
        folder: to look through.
        bad: takes folders that cannot be read, or lie too deep.
    """
    return sorted(_below(folder, bad, set(), _DEEPEST))


def is_visible_folder(path: Path) -> bool:
    """Whether it is a folder, or a link to one, and not hidden."""
    return path.is_dir() and not path.name.startswith(".")


def _below(
    folder: Path, bad: list[BadFile], seen: set[tuple[int, int]], deeper: int
) -> Iterator[Path]:
    """Also in folders within, and where links lead; not into a folder that has been seen."""
    try:
        status = folder.stat()
        identity = (status.st_dev, status.st_ino)
        if identity in seen:
            return
        seen.add(identity)
        entries = sorted(folder.iterdir())
    except OSError as error:
        bad.append(BadFile(folder, f"expected a folder that can be read, got {error.strerror}"))
        return
    for path in entries:
        if is_visible_folder(path):
            if deeper:
                yield from _below(path, bad, seen, deeper - 1)
            else:
                bad.append(BadFile(path, f"expected folders at most {_DEEPEST} deep"))
        elif is_picture(path) and (path.is_file() or path.is_symlink()):
            yield path  # or a link that leads nowhere, which is told when it is read
