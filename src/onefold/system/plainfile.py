"""Reads files that anybody may have put in place: regular ones only, and never without a limit.

A link could lead anywhere, opening a FIFO would wait, a device has no end, and JSON may be nested
until Python gives up. Each of these ends here, in an `OSError` or a `ValueError`. Writing is here
as well, since a file is written so that a reader finds either the old one or the new one, whole.
"""

from __future__ import annotations

import errno
import json
import os
import stat
from io import BufferedReader
from pathlib import Path
from typing import Any

from onefold.system.ownfiles import aside_of

__all__ = [
    "RECORD_BYTES",
    "nested_too_deeply",
    "open_plain",
    "parse_json",
    "read_plain",
    "write_whole",
]

RECORD_BYTES = 64 << 20
"""The largest text file that is read whole: records, options, a line of metrics."""

_DEEPEST = 200
"""How many lists and dicts may be nested in JSON; what onefold writes has far fewer."""
# O_NONBLOCK, or opening a FIFO would wait for its writer; O_NOCTTY, or a terminal would become
# ours.
_FLAGS = os.O_RDONLY | os.O_NONBLOCK | os.O_NOCTTY | os.O_CLOEXEC


def open_plain(path: Path, *, follow: bool = False) -> BufferedReader:
    """Open a regular file for reading, without waiting.

    Args:
        path: path of the file.
        follow: whether to follow links, as is right if the user has named the file.

    Raises:
        FileNotFoundError: the file does not exist.
        OSError: the path is a link, a folder, a FIFO or a device, or cannot be opened.
    """
    try:
        descriptor = os.open(path, _FLAGS | (0 if follow else os.O_NOFOLLOW))
    except OSError as error:
        if error.errno == errno.ELOOP and not follow:
            raise _not_plain(path, "a link") from None
        raise
    try:
        # Asked of the descriptor: a path may be exchanged between a look at it and its opening.
        kind = os.fstat(descriptor).st_mode
        if not stat.S_ISREG(kind):
            raise _not_plain(path, "a folder" if stat.S_ISDIR(kind) else "a FIFO or a device")
        return os.fdopen(descriptor, "rb")
    except BaseException:
        os.close(descriptor)
        raise


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


def write_whole(path: Path, content: bytes, *, sync: bool = True) -> None:
    """Write a file aside, and move it to its path when it is whole; a link there is replaced.

    Args:
        path: path of the file.
        content: everything that it will hold.
        sync: whether it must be on the disk before it replaces what was there.

    Raises:
        OSError: the file cannot be written; what was there before is unchanged.
    """
    with aside_of(path) as file:
        file.write(content)
        # A rename may reach the disk before the bytes do: after a power failure the name would
        # stand for an empty file, and the old one would be gone.
        if sync:
            file.flush()
            os.fsync(file.fileno())


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


def _not_plain(path: Path, came: str) -> OSError:
    return OSError(errno.EINVAL, f"expected a file, got {came}", str(path))
