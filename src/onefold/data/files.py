"""Reads the user's files within bounds, and refuses to overwrite what onefold did not make."""

from __future__ import annotations

import hashlib
import json
import os
import stat
from collections.abc import Callable
from io import BufferedReader
from pathlib import Path
from typing import Any

from onefold.system.ownfiles import open_plain, parse_json

__all__ = ["digest_of", "open_regular", "read_json", "read_whole", "require_ours"]


_HEAD_BYTES = 512
"""How much of a file is read to recognise it as one of ours."""


def open_regular(path: Path) -> BufferedReader:
    """Open a file that the user has named, or that lies in a folder of theirs; follow links.

    Raises:
        OSError: the file does not exist or may not be read, or is a folder, a pipe or a device.
    """
    # Large data sets are often folders of links to one copy, so here links are nothing strange.
    return open_plain(path, follow=True)


def read_whole(path: Path, most_bytes: int) -> bytes:
    """Read all of a file that must not be large.

    Raises:
        OSError: the file cannot be read.
        ValueError: the file is larger than ``most_bytes``.
    """
    with open_regular(path) as file:
        # One byte more than allowed, instead of asking for the size: a file in /proc reports 0, and
        # any file may grow after it was asked.
        content = file.read(most_bytes + 1)
    if len(content) > most_bytes:
        raise ValueError(f"{path}: expected a file of at most {most_bytes:,} bytes, got more")
    return content


def read_json(path: Path, most_bytes: int) -> Any:
    """Parse a JSON file.

    Raises:
        OSError: the file cannot be read.
        ValueError: the file is larger than ``most_bytes``, nested too deeply, or not JSON; the
            message names it.
    """
    content = read_whole(path, most_bytes)
    try:
        return parse_json(content.decode())
    except ValueError as error:
        raise ValueError(f"{path}: expected JSON: {error}") from error


def require_ours(path: Path, ours: Callable[[bytes], bool], told: str) -> None:
    """Refuse to write over anything that onefold did not make.

    Args:
        path: path of the file that is to be written.
        ours: takes the first bytes of a file and returns whether the file may be replaced.
        told: beginning of the error: the option that names the path, and what it takes.

    Raises:
        ValueError: the path is a link, a folder, a pipe or a device, or a file that is not ours.
        OSError: the file cannot be read.
    """
    try:
        # Not through a link: writing replaces the link, and the user put it there on purpose.
        found = os.lstat(path)
    except FileNotFoundError:
        return
    if stat.S_ISREG(found.st_mode):
        with open_regular(path) as file:
            head = file.read(_HEAD_BYTES)
        # Nothing is lost with an empty file, such as mktemp leaves to reserve a name.
        if not head or ours(head):
            return
        came = "a file with something else in it"
    else:
        came = "a link" if stat.S_ISLNK(found.st_mode) else "no regular file"
    raise ValueError(f"{told}, {path} is {came}: remove it, or give another name")


def digest_of(*parts: Any, size_bytes: int = 8) -> str:
    """Digest texts, numbers, and lists of these; 8 bytes give 16 hexadecimal digits.

    >>> digest_of(["a.png", "b.png"], [0, 1])
    '0ef90b3a28133b26'
    """
    # As JSON, whose brackets and quotes mark where each text ends: joined texts ["ab", "c"] and
    # ["a", "bc"] would digest alike. Its default escapes also take names that are not UTF-8.
    return hashlib.blake2b(json.dumps(parts).encode(), digest_size=size_bytes).hexdigest()
