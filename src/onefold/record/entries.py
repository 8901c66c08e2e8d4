"""The record of a run as a file: its kinds of entries, and the frames that hold them.

Every entry is a MessagePack map with the name of its kind under ``kind``. Numbers of shards lie in
``bytes`` of little-endian 64-bit values, V of them: floats in ``totals`` and ``weights``, whole
numbers in ``digests``.

Note: the file
--------------
It begins with the eight bytes of `HEAD`. Behind them come frames: the length of the body, the same
with all bits inverted, and the body's CRC-32, each as a little-endian uint32; then the body. A
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

import msgspec
from msgspec import Struct
from msgspec.structs import replace

from onefold.errors import RecordError
from onefold.system.safe_files import open_plain, open_regular, write_all
from onefold.system.words import in_shell

__all__ = [
    "HEAD",
    "AuditEntry",
    "BlockEntry",
    "Entry",
    "FailureEntry",
    "FrameWriter",
    "HangEntry",
    "Result",
    "SameProcessEntry",
    "SavedEntry",
    "StartEntry",
    "StepEntry",
    "append_beside",
    "decode",
    "encode",
    "read_frames",
]


class StartEntry(Struct, tag="begun", tag_field="kind", frozen=True, kw_only=True):
    """A run began here, or was resumed: what was written of later steps does not count."""

    run: str
    """The run's name, kept when it is resumed."""
    step: int
    """How many steps are done."""
    time: str
    """ISO 8601, UTC."""
    trainer: int = 0
    """Number of the Trainer among those of the script."""
    allow_changed: list[str] = []
    """What differed on purpose from the run that was resumed."""
    command: list[str]
    """The script with its arguments."""
    folder: str = ""
    """The working directory in which the program was started."""
    python: str = ""
    """Path of the Python interpreter."""
    module: str = ""
    """Name of the module that was run in place of a script."""
    script: str
    """Path of the script; empty where there is none."""
    script_digest: str
    """SHA-256 of its text, as hexadecimal digits."""
    flags: dict[str, str] = {}
    """The environment variables by which libraries choose their kernels."""
    libraries: dict[str, str] = {}
    """The version of each library that was loaded and says which one it is."""
    devices: list[str]
    description: dict[str, str]
    """What the numbers depend on, in words: settings, versions, processor, parameters; the same on
    all devices."""
    anew: bool = False
    """Whether no script could be answered from what was written before: it has gone back by
    `Trainer.load`, or something was changed on purpose."""
    kept: int = 0
    """How many of the entries before this one the checkpoint has seen; those that counted for it
    count."""


class StepEntry(Struct, tag="step", tag_field="kind", frozen=True, kw_only=True):
    """A step was made, or skipped."""

    step: int
    epoch: int
    samples: int
    name: str = ""
    """Of the loss, where there are several."""
    gradient: bool = False
    """Whether the update was the script's, by `Trainer.gradient`."""
    loss: float
    weight: float
    norm: float
    """Of the whole gradient before clipping; NaN where there was none."""
    skipped: str = ""
    """Why nothing was updated."""
    rates: list[float]
    """The learning rate of each of the optimizer's groups in this step."""
    values: dict[str, float] = {}
    """What the loss returned beside itself."""
    outputs: list[str] = []
    """The names of what it returned for each sample."""
    rows: bytes = b""
    """These outputs, as `encode` writes them (`onefold.core.encoding`); empty if too large."""
    place: list[tuple[int, int, int, int]] = []
    """Loader, pass, where the batch ends in the pass, and its samples; for each loader in it."""
    totals: bytes
    """V float64: each shard's part of the loss, before the division by ``weight``."""
    weights: bytes
    """V float64: each shard's part of the divisor; below 0 where there is none."""
    digests: bytes = b""
    """V uint64: of the same sample of each shard's gradient."""
    time: float = 0.0
    """Seconds since 1970, when it was noted; 0 in records that have no times. Steps that differ in
    nothing else are equal."""

    def __eq__(self, other: object) -> bool:
        return isinstance(other, StepEntry) and encode(replace(self, time=0.0)) == encode(
            replace(other, time=0.0)
        )


class FailureEntry(Struct, tag="failed", tag_field="kind", frozen=True, kw_only=True):
    """A step that raised an error, which the script survived."""

    step: int
    line: str
    """Where in the script."""
    error: str
    """Its class, in `onefold.errors` or one of Python's."""
    text: str


class Result(Struct, tag="result", tag_field="kind", frozen=True, kw_only=True):
    """Something that the script asked for between two steps."""

    step: int
    call: str
    """``evaluate``, ``predict``, ``gather`` or ``broadcast``."""
    line: str
    """Where in the script."""
    value: bytes | None
    """As `onefold.core.encoding.encode` writes it; None where it was too large to keep."""
    digest: str
    """Of the value, also where that was not kept."""


class BlockEntry(Struct, tag="modifying", tag_field="kind", frozen=True, kw_only=True):
    """A block of `Trainer.modifying` has ended."""

    step: int
    line: str
    """Where in the script."""
    digest: int
    """Of a sample of each parameter and buffer, as the block left them."""


class SavedEntry(Struct, tag="checkpoint", tag_field="kind", frozen=True, kw_only=True):
    """A checkpoint was begun."""

    step: int
    folder: str
    line: str = ""
    """Where in the script; empty where the launcher had it made."""


class AuditEntry(Struct, tag="audit", tag_field="kind", frozen=True, kw_only=True):
    """An audit has found a wrong result."""

    step: int
    shard: int
    """-1 for the update of a part of the parameters."""
    devices: list[int]
    """Who is at fault; two where it cannot be told which one."""
    persistent: bool
    healed: bool


class SameProcessEntry(Struct, tag="same_process", tag_field="kind", frozen=True, kw_only=True):
    """From here on, the only device audits its shards in the run's own process, without a child."""

    step: int
    why: str


class HangEntry(Struct, tag="hang", tag_field="kind", frozen=True, kw_only=True):
    """A device has waited for very long; what the launcher has told of it.

    Nothing depends on it: it counts as no entry where entries are counted.
    """

    step: int
    text: str
    """Who has waited for whom, with the stacks of all processes."""


Found = AuditEntry | SameProcessEntry
"""What an audit writes down."""
Entry = StartEntry | StepEntry | FailureEntry | Result | BlockEntry | SavedEntry | Found | HangEntry
_ENCODER = msgspec.msgpack.Encoder()
_DECODER: msgspec.msgpack.Decoder[Entry] = msgspec.msgpack.Decoder(Entry)


def encode(entry: Entry | list[tuple[int, Entry]]) -> bytes:
    """Write an entry as MessagePack, or several with their numbers as a list."""
    return _ENCODER.encode(entry)


def decode(body: bytes, where: str) -> Entry:
    """Read an entry.

    Raises:
        RecordError: it is none, or of a later version; ``where`` names it.
    """
    try:
        return _DECODER.decode(body)
    except msgspec.DecodeError as error:
        raise RecordError(f"{where}: expected an entry of a record, got another: {error}") from None


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
