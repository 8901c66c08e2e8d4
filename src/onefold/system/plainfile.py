"""Reads files that anybody may have put where they lie: regular ones alone, and never without end;
and writes beside such files without touching what is not its own.

A link could lead anywhere, a FIFO would be waited for, a device has no end, and JSON may be nested
until Python gives up. All of these end here, in one `OSError` or `ValueError` each.
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
"""The largest file of words that is read whole: records, options, a line of metrics."""

_DEEPEST = 200
"""Levels of lists and dicts in JSON; what this program writes has far fewer."""
_FLAGS = os.O_RDONLY | os.O_NONBLOCK | os.O_NOCTTY | os.O_CLOEXEC


def open_plain(path: Path, *, follow: bool = False) -> BufferedReader:
    """Open a regular file for reading, without waiting.

    Args:
        path: of the file.
        follow: links, as where a user has named the file.

    Raises:
        FileNotFoundError: there is no such file.
        OSError: it is a link, a folder, a FIFO or a device, or cannot be opened.
    """
    try:
        descriptor = os.open(path, _FLAGS | (0 if follow else os.O_NOFOLLOW))
    except OSError as error:
        if error.errno == errno.ELOOP and not follow:
            raise _not_plain(path, "a link") from None
        raise
    try:
        kind = os.fstat(descriptor).st_mode
        if not stat.S_ISREG(kind):
            raise _not_plain(path, "a folder" if stat.S_ISDIR(kind) else "a FIFO or a device")
        return os.fdopen(descriptor, "rb")
    except BaseException:
        os.close(descriptor)
        raise


def read_plain(path: Path, limit_bytes: int = RECORD_BYTES) -> bytes:
    """What a regular file holds.

    Raises:
        FileNotFoundError: there is no such file.
        OSError: it is no regular file, or larger than the limit.
    """
    with open_plain(path) as file:
        size = os.fstat(file.fileno()).st_size
        content = file.read(limit_bytes + 1) if size <= limit_bytes else b""
    if max(size, len(content)) > limit_bytes:
        got = f"{size:,}" if size > limit_bytes else "more"  # it has grown, or claims no size
        raise OSError(errno.EFBIG, f"expected {limit_bytes:,} bytes at most, got {got}", str(path))
    return content


def parse_json(text: str | bytes) -> Any:
    """The value of a JSON text.

    Raises:
        ValueError: it is no JSON, is nested too deeply, or has a number of thousands of digits.
    """
    try:
        value = json.loads(text)
    except RecursionError:
        raise ValueError("it is nested too deeply") from None
    if nested_too_deeply(value):
        raise ValueError("it is nested too deeply")
    return value


def write_whole(path: Path, content: bytes, *, sync: bool = True) -> None:
    """Write a file aside, and put it in its place when it is whole; a link there is replaced.

    Args:
        path: of the file.
        content: all of it.
        sync: have it on the disk before it takes its place.

    Raises:
        OSError: it cannot be written; what was there before is as it was.
    """
    with aside_of(path) as file:
        file.write(content)
        if sync:
            file.flush()
            os.fsync(file.fileno())


def nested_too_deeply(value: object) -> bool:
    """Whether lists and dicts lie in each other deeper than anything that is written here."""
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
