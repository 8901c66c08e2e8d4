"""Reads files of the user, with a bound each, and refuses to write where something of his lies."""

from __future__ import annotations

import os
import stat
from collections.abc import Callable
from io import BufferedReader
from pathlib import Path
from typing import Any

from onefold.system.plainfile import open_plain, parse_json

__all__ = ["open_regular", "read_json", "read_whole", "require_ours"]

_HEAD_BYTES = 512


def open_regular(path: Path) -> BufferedReader:
    """Open a file that the user has named, or that lies in a folder of his; links are followed.

    Raises:
        OSError: there is none, it may not be read, or it is a folder, a pipe or a device.
    """
    return open_plain(path, follow=True)


def read_whole(path: Path, most_bytes: int) -> bytes:
    """The content of a file that is not large.

    Raises:
        OSError: it cannot be read.
        ValueError: it is larger.
    """
    with open_regular(path) as file:
        content = file.read(most_bytes + 1)
    if len(content) > most_bytes:
        raise ValueError(f"{path}: expected a file of at most {most_bytes:,} bytes, got more")
    return content


def read_json(path: Path, most_bytes: int) -> Any:
    """What a JSON file holds.

    Raises:
        OSError: it cannot be read.
        ValueError: it is larger, nested too deep, or no JSON; the message names the file.
    """
    content = read_whole(path, most_bytes)
    try:
        return parse_json(content.decode())
    except ValueError as error:
        raise ValueError(f"{path}: expected JSON: {error}") from error


def require_ours(path: Path, ours: Callable[[bytes], bool], told: str) -> None:
    """Refuse to write where something lies that onefold has not made.

    Args:
        path: of a file that is to be written.
        ours: whether a file that begins so is one that may be replaced.
        told: of the option that names it, and what it takes, for the error.

    Raises:
        ValueError: it is a link, a folder, a pipe or a device, or a file that begins otherwise.
        OSError: it cannot be read.
    """
    try:
        found = os.lstat(path)
    except FileNotFoundError:
        return
    if stat.S_ISREG(found.st_mode):
        with open_regular(path) as file:
            head = file.read(_HEAD_BYTES)
        if not head or ours(head):
            return
        came = "a file with something else in it"
    else:
        came = "a link" if stat.S_ISLNK(found.st_mode) else "no regular file"
    raise ValueError(f"{told}, {path} is {came}: remove it, or give another name")
