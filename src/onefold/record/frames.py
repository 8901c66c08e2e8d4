"""Appends entries to a file, one frame each, and reads them back after a kill at any byte.

Note: the format
----------------
The file begins with the eight bytes of `HEAD`. Behind them come frames: the length of the body, the
same with all bits inverted, and the body's CRC-32, each as a little-endian uint32; then the body. A
frame is written by one call, so a process that is killed leaves a beginning of its last frame at
most. That is the *torn tail*, which readers leave out and the next writer cuts off. Anything else
that does not check is damage, and refused.
"""

from __future__ import annotations

import fcntl
import logging
import os
import struct
from pathlib import Path
from zlib import crc32

from onefold.errors import RecordError
from onefold.system.safe_files import open_plain, open_regular, write_all
from onefold.system.words import in_shell

__all__ = ["HEAD", "FrameWriter", "append_beside", "read_frames"]

HEAD = b"onefold\x01"
"""How a file of frames begins; the last byte is the version of the format."""

_log = logging.getLogger("onefold")
_HEADER = struct.Struct("<III")
_INVERTED = 0xFFFFFFFF


class FrameWriter:
    """Appends frames to a file, which it creates or goes on with.

    Args:
        path: the file; its folder exists.

    Raises:
        OSError: the file cannot be written, is a link or no regular file, or another process
            writes to it.
        RecordError: the file is something else, or damaged.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self._file = open_regular(path, os.O_RDWR | os.O_APPEND | os.O_CREAT)
        try:
            self.before, end, torn = read_frames(path)
            """The bodies that were there before, in order."""
            # Only now: to close another descriptor of the file, as reading does, lets go of it.
            self._lock()
            if torn:
                _log.warning("%s: %d bytes of a torn frame are cut off", path, torn)
            os.ftruncate(self._file, end)
            if not end:
                write_all(self._file, HEAD)
        except BaseException:
            os.close(self._file)
            raise

    def append(self, body: bytes) -> None:
        """Append one frame.

        Raises:
            OSError: the disk is full, for example; nothing of the frame counts then.
        """
        write_all(self._file, _frame(body))

    def close(self) -> None:
        """Close the file, if it is open; nothing can be appended any more."""
        if self._file >= 0:
            os.close(self._file)
        self._file = -1

    def _lock(self) -> None:
        try:
            fcntl.lockf(self._file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as error:
            text = "another run writes its record there: name another folder by --record"
            raise BlockingIOError(error.errno, text, str(self.path)) from None
        except OSError as error:  # a file system without locks
            _log.info("%s: the record is not locked: %s", self.path, error)


def append_beside(path: Path, body: bytes) -> None:
    """Append a frame from another process than the one that writes to the file.

    Raises:
        OSError: the file cannot be written.
    """
    file = open_regular(path, os.O_WRONLY | os.O_APPEND)
    try:
        write_all(file, _frame(body))  # at once, and so never inside of another frame
    finally:
        os.close(file)


def _frame(body: bytes) -> bytes:
    return _HEADER.pack(len(body), len(body) ^ _INVERTED, crc32(body)) + body


def read_frames(path: Path) -> tuple[list[bytes], int, int]:
    """Read the bodies of all whole frames, and where the last one ends.

    Returns:
        The bodies in order, the number of bytes up to the torn tail, and that of the tail.

    Raises:
        OSError: the file cannot be read, or is no regular file.
        RecordError: it is not a file of frames of this format, or damaged before its end.
    """
    with open_plain(path) as file:
        data = file.read()
    if not data.startswith(HEAD):
        if HEAD.startswith(data):
            return [], 0, len(data)
        raise RecordError(
            f"{path} is no record of onefold, or of another version: expected it to begin with "
            f"{HEAD!r}, got {data[: len(HEAD)]!r}"
        )
    at, bodies = len(HEAD), list[bytes]()
    while (begin := at + _HEADER.size) <= len(data):
        length, inverted, check = _HEADER.unpack_from(data, at)
        if length ^ inverted != _INVERTED and any(data[at:]):  # a power failure may leave zeros
            raise _damaged(path, at, len(bodies))
        body = data[begin : begin + length]
        if not length or len(body) < length:
            break
        if crc32(body) != check:
            if begin + length < len(data):
                raise _damaged(path, at, len(bodies))
            break
        bodies.append(body)
        at = begin + length
    return bodies, at, len(data) - at


def _damaged(path: Path, at: int, whole: int) -> RecordError:
    return RecordError(
        f"{path} is damaged: the frame at byte {at} does not check. The {whole} frames before it "
        f"are whole: to use these, cut the file there by truncate --size {at} {in_shell(path)}"
    )
