"""The record of a run as a file: its kinds of entries, and the frames that hold them.

Every entry is a MessagePack map with the name of its kind under ``kind``. Numbers of shards lie in
``bytes`` of little-endian 64-bit values, V of them: floats in ``totals`` and ``weights``, whole
numbers in ``digests``.

Note: the file
--------------
It begins with the eight bytes of `HEAD`, followed by frames. A frame is a header of 24 bytes and
the body: the body's length and the same with all bits inverted, each as a little-endian uint32, and
a digest of 16 bytes. The digest is that of the previous digest and the body together, so each frame
stands for all that precede it: the *chain*. A checkpoint keeps the digest of the last frame that it
has seen, and no other record can be taken for that of its run. docs/reference/record-format.md says
what this proves.

A frame is written by one call, so a process that is killed leaves a beginning of its last frame at
most, and a power failure zeros in its place. That is the *torn tail*, which readers leave out and
the next writer cuts off. Anything else that does not check is damage, and refused.

The launcher appends what it tells of a hang, while another process writes the chain. Such a frame
is *beside* the chain: its digest is of its own body alone, and nothing depends on it.
"""

from __future__ import annotations

import hashlib
import logging
import os
import struct
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Annotated, Any, BinaryIO, NamedTuple

import msgspec
from msgspec import Meta, Struct
from msgspec.structs import replace

from onefold.core import encoding
from onefold.core.options import RECORD_FILE
from onefold.errors import RecordError
from onefold.system.folder_lock import FolderLock
from onefold.system.safe_files import RECORD_BYTES, open_plain, open_regular, write_all
from onefold.system.words import in_shell

__all__ = [
    "HEAD",
    "AuditEntry",
    "BlockEntry",
    "Entry",
    "FailureEntry",
    "Frame",
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
    "harmless_flags",
    "read_frames",
    "restore",
]


Number = Annotated[int, Meta(ge=0, lt=1 << 62)]
"""A whole number that an array can have."""


class StartEntry(Struct, tag="begun", tag_field="kind", frozen=True, kw_only=True):
    """A run began here, or was resumed: what was written of later steps does not count."""

    run: str
    """The run's name, kept when it is resumed."""
    step: Number
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
    devices: Annotated[list[str], Meta(min_length=1)]
    description: dict[str, str]
    """What the numbers depend on, in words: settings, versions, processor, parameters; the same on
    all devices."""
    anew: bool = False
    """Whether no script could be answered from what was written before: it has gone back by
    `Trainer.load`, or something was changed on purpose."""
    kept: Number = 0
    """How many of the entries before this one the checkpoint has seen; those that counted for it
    count."""


_HARMLESS = frozenset(
    (
        *("ATEN_CPU_CAPABILITY", "CUBLASLT_WORKSPACE_SIZE", "CUBLAS_WORKSPACE_CONFIG"),
        *("DNNL_DEFAULT_FPMATH_MODE", "DNNL_MAX_CPU_ISA", "GOMP_CPU_AFFINITY", "GOMP_SPINCOUNT"),
        *("KMP_AFFINITY", "KMP_BLOCKTIME", "KMP_DETERMINISTIC_REDUCTION", "MKL_CBWR"),
        *("MKL_DYNAMIC", "MKL_ENABLE_INSTRUCTIONS", "MKL_NUM_THREADS", "NVIDIA_TF32_OVERRIDE"),
        *("OMP_DYNAMIC", "OMP_NUM_THREADS", "OMP_PLACES", "OMP_PROC_BIND", "OMP_SCHEDULE"),
        *("ONEDNN_DEFAULT_FPMATH_MODE", "ONEDNN_MAX_CPU_ISA", "PYTORCH_ALLOC_CONF"),
        *("PYTORCH_CUDA_ALLOC_CONF", "TORCH_ALLOW_TF32_CUBLAS_OVERRIDE"),
        *("TORCH_BLAS_PREFER_CUBLASLT", "TORCH_CPP_LOG_LEVEL", "TORCH_CUDNN_V8_API_DISABLED"),
    )
)
"""Variables that choose kernels and name no file, library or program."""


def harmless_flags(flags: Mapping[str, str]) -> dict[str, str]:
    """Those variables of a file that may be set for a process that computes a step again.

    Others with the same beginnings load libraries (``OMP_TOOL_LIBRARIES``), run code that lies in
    a folder (``TORCH_EXTENSIONS_DIR``), or write files (``CUDNN_LOGDEST_DBG``).

    >>> harmless_flags({"OMP_NUM_THREADS": "1", "OMP_TOOL_LIBRARIES": "/tmp/evil.so"})
    {'OMP_NUM_THREADS': '1'}
    """
    return {name: value for name, value in flags.items() if name in _HARMLESS}


class StepEntry(Struct, tag="step", tag_field="kind", frozen=True, kw_only=True):
    """A step was made, or skipped."""

    step: Number
    epoch: Number
    samples: Number
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

    def __post_init__(self) -> None:
        size = len(self.totals)
        if size % 8 or len(self.weights) != size or len(self.digests) not in (0, size):
            raise ValueError("expected as many numbers of 8 bytes in totals, weights and digests")

    def __eq__(self, other: object) -> bool:
        return isinstance(other, StepEntry) and encode(replace(self, time=0.0)) == encode(
            replace(other, time=0.0)
        )


class FailureEntry(Struct, tag="failed", tag_field="kind", frozen=True, kw_only=True):
    """A step that raised an error, which the script survived."""

    step: Number
    line: str
    """Where in the script."""
    error: str
    """Its class, in `onefold.errors` or one of Python's."""
    text: str


class Result(Struct, tag="result", tag_field="kind", frozen=True, kw_only=True):
    """Something that the script asked for between two steps."""

    step: Number
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

    step: Number
    line: str
    """Where in the script."""
    digest: int
    """Of a sample of each parameter and buffer, as the block left them."""


class SavedEntry(Struct, tag="checkpoint", tag_field="kind", frozen=True, kw_only=True):
    """A checkpoint was begun."""

    step: Number
    folder: str
    line: str = ""
    """Where in the script; empty where the launcher had it made."""


class AuditEntry(Struct, tag="audit", tag_field="kind", frozen=True, kw_only=True):
    """An audit has found a wrong result."""

    step: Number
    shard: int
    """-1 for the update of a part of the parameters."""
    devices: list[int]
    """Who is at fault; two where it cannot be told which one."""
    persistent: bool
    healed: bool


class SameProcessEntry(Struct, tag="same_process", tag_field="kind", frozen=True, kw_only=True):
    """From here on, the only device audits its shards in the run's own process, without a child."""

    step: Number
    why: str


class HangEntry(Struct, tag="hang", tag_field="kind", frozen=True, kw_only=True):
    """A device has waited for very long; what the launcher has told of it.

    Nothing depends on it: it counts as no entry where entries are counted.
    """

    step: Number
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
    except (msgspec.DecodeError, ValueError, RecursionError) as error:
        raise RecordError(f"{where}: expected an entry of a record, got another: {error}") from None


def restore(value: bytes, step: int) -> Any:
    """Restore what a script was given, from an entry of a step.

    Raises:
        RecordError: the bytes are no value; only somebody who made the record up writes such.
    """
    try:
        return encoding.decode(value)
    except ValueError as error:
        raise RecordError(
            f"{RECORD_FILE}, step {step}: expected what the script was given, got: {error}. Use "
            f"the run's own record, or remove it to resume without answers to the script"
        ) from None


HEAD = b"onefold\x02"
"""How a file of frames begins; the last byte is the version of the format."""

_log = logging.getLogger("onefold")
_DIGEST_BYTES = 16
_HEADER = struct.Struct(f"<II{_DIGEST_BYTES}s")
_INVERTED = 0xFFFFFFFF


class FrameWriter:
    """Appends frames to a file, which it creates or continues.

    Args:
        path: the file; its folder exists.

    Raises:
        OSError: the file cannot be written, is a link or no regular file.
        LaunchError: another process writes to it.
        RecordError: the file is something else, or damaged.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self._lock = FolderLock(
            path.parent, instead="name another folder by --record", name=f".{path.name}.lock"
        )
        self._lock.acquire()
        self._file = -1
        try:
            self._file = open_regular(path, os.O_RDWR | os.O_APPEND | os.O_CREAT)
            self.entries, self.head, end = 0, _FIRST, len(HEAD)
            """How many frames the chain has, and the digest of the last."""
            with open_plain(path) as file:
                for frame in _frames(path, file):
                    self.entries += bool(frame.head)
                    self.head, end = frame.head or self.head, frame.end
                size = os.fstat(file.fileno()).st_size
            end = end if size >= len(HEAD) else 0
            if size > end:
                _log.warning("%s: %d bytes of a torn frame are cut off", path, size - end)
            os.ftruncate(self._file, end)
            if not end:
                write_all(self._file, HEAD)
        except BaseException:
            self.close()
            raise

    def append(self, body: bytes) -> None:
        """Append one frame to the chain.

        Raises:
            OSError: the disk is full, for example; nothing of the frame counts then.
        """
        head = _digest(self.head, body)
        write_all(self._file, _frame(body, head))
        self.entries, self.head = self.entries + 1, head

    def sync(self) -> None:
        """Wait until everything is on the disk."""
        os.fdatasync(self._file)

    def close(self) -> None:
        """Close the file, if it is open; nothing can be appended any more."""
        if self._file >= 0:
            os.close(self._file)
        self._file = -1
        self._lock.let_go()


def append_beside(path: Path, body: bytes) -> None:
    """Append a frame from another process than the one that writes the chain.

    Raises:
        OSError: the file cannot be written.
    """
    file = open_regular(path, os.O_WRONLY | os.O_APPEND)
    try:
        # At once, and so never inside of another frame.
        write_all(file, _frame(body, _digest(_BESIDE, body)))
    finally:
        os.close(file)


def _digest(previous: bytes, body: bytes) -> bytes:
    return hashlib.blake2b(previous + body, digest_size=_DIGEST_BYTES).digest()


_FIRST, _BESIDE = _digest(b"", HEAD), _digest(b"beside", HEAD)
"""What stands for the previous digest in the first frame, and in those beside the chain."""


def _frame(body: bytes, digest: bytes) -> bytes:
    return _HEADER.pack(len(body), len(body) ^ _INVERTED, digest) + body


class Frame(NamedTuple):
    """A whole frame of a file."""

    body: bytes
    head: bytes
    """The digest of the chain up to here; empty beside the chain."""
    end: int
    """Where it ends in the file."""


def read_frames(path: Path) -> tuple[list[Frame], int]:
    """Read all whole frames.

    Returns:
        The frames in order, and the number of bytes of the torn tail.

    Raises:
        OSError: the file cannot be read, or is no regular file.
        RecordError: it is not a file of frames of this format, or damaged before its end.
    """
    with open_plain(path) as file:
        frames = list(_frames(path, file))
        size = os.fstat(file.fileno()).st_size
    whole = frames[-1].end if frames else len(HEAD)
    return frames, size - whole if size >= len(HEAD) else size


def _frames(path: Path, file: BinaryIO) -> Iterator[Frame]:
    """Read frame by frame: a file may be larger than memory."""
    start = file.read(len(HEAD))
    if start != HEAD:
        if HEAD.startswith(start):
            return
        raise RecordError(
            f"{path} is no record of onefold, or of another version: expected it to begin with "
            f"{HEAD!r}, got {start!r}"
        )
    at, head, number = len(HEAD), _FIRST, 0
    while len(header := file.read(_HEADER.size)) == _HEADER.size:
        length, inverted, check = _HEADER.unpack(header)
        is_length = length ^ inverted == _INVERTED and 0 < length <= RECORD_BYTES
        body = file.read(length) if is_length else b""
        if is_length and len(body) < length:
            return
        following = _digest(head, body)
        is_next, is_beside = check == following, check == _digest(_BESIDE, body)
        if not is_length or not (is_next or is_beside):
            if _has_zeros_alone(file):  # as a power failure may leave
                return
            raise RecordError(
                f"{path} is damaged: the frame at byte {at} does not check, or was written for "
                f"another place. The {number} frames before it are whole: to use these, cut the "
                f"file there by truncate --size {at} {in_shell(path)}"
            )
        head = following if is_next else head
        at += _HEADER.size + length
        number += 1
        yield Frame(body, head if is_next else b"", at)


def _has_zeros_alone(file: BinaryIO) -> bool:
    """Whether nothing but zeros comes in the rest of a file."""
    return not any(chunk.strip(b"\0") for chunk in iter(lambda: file.read(1 << 20), b""))
