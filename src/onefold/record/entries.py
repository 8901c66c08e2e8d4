"""The file format of a run's record: kinds of entries, and the frames that hold them.

Every entry is a MessagePack map that stores the name of its kind under ``kind``. Per-shard numbers
are ``bytes`` of V little-endian 64-bit values: floats in ``totals`` and ``weights``, integers in
``digests``.

Note: the file
--------------
The file begins with the eight bytes of `HEAD`, followed by frames. A frame is a 24-byte header and
a body. The header holds the body's length, the same length with all bits inverted (each a
little-endian uint32), and a 16-byte digest of the previous frame's digest and the body. Each digest
therefore covers all earlier frames: the *chain*. A checkpoint stores the digest of the last frame
written before it, so no other record can be mistaken for its run's record.
https://onefold.example/reference/record-format.html explains what this proves.

A frame is written by one call, so a killed process leaves at most one partial frame at the end, and
a power failure leaves zeros there. This is the *torn tail*: readers skip it and the next writer
truncates it. Anything else that fails the check is damage and raises `RecordError`.

The launcher appends hang reports while another process writes the chain. Such a frame is *beside*
the chain: its digest covers only its own body, and no other digest depends on it.
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
"""A non-negative integer that fits in an int64 array."""


class StartEntry(Struct, tag="begun", tag_field="kind", frozen=True, kw_only=True):
    """The start or resume of a run. A resume discards the entries after its checkpoint."""

    run: str
    """Name of the run. A resumed run keeps it."""
    step: Number
    """Number of finished steps."""
    time: str
    """Start time: ISO 8601, UTC."""
    trainer: int = 0
    """Number of this Trainer among the script's Trainers."""
    allow_changed: list[str] = []
    """Settings that may differ from the resumed run; see ``--allow-changed``."""
    command: list[str]
    """The script with its arguments."""
    folder: str = ""
    """Working directory at the start of the program."""
    python: str = ""
    """Path of the Python interpreter."""
    module: str = ""
    """Name of the module if one was run instead of a script."""
    script: str
    """Path of the script; empty if there is none."""
    script_digest: str
    """SHA-256 of the script's text, in hexadecimal."""
    flags: dict[str, str] = {}
    """Environment variables that select the kernels of libraries."""
    libraries: dict[str, str] = {}
    """Versions of the loaded libraries that have a ``__version__``."""
    devices: Annotated[list[str], Meta(min_length=1)]
    description: dict[str, str]
    """Everything that the numbers depend on: settings, versions, CPU, parameters; the same on all
    devices."""
    anew: bool = False
    """Whether earlier entries cannot be replayed, because the script went back by `Trainer.load` or
    a setting was changed on purpose."""
    kept: Number = 0
    """Number of earlier entries that the checkpoint includes. Later ones do not count."""


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
"""Variables that choose kernels and do not name a file, library or program."""


def harmless_flags(flags: Mapping[str, str]) -> dict[str, str]:
    """Return the recorded variables that are safe to set for a process that replays a step.

    Other variables with the same prefixes load libraries (``OMP_TOOL_LIBRARIES``), run code from a
    directory (``TORCH_EXTENSIONS_DIR``), or write files (``CUDNN_LOGDEST_DBG``).

    >>> harmless_flags({"OMP_NUM_THREADS": "1", "OMP_TOOL_LIBRARIES": "/tmp/evil.so"})
    {'OMP_NUM_THREADS': '1'}
    """
    return {name: value for name, value in flags.items() if name in _HARMLESS}


class StepEntry(Struct, tag="step", tag_field="kind", frozen=True, kw_only=True):
    """A finished or skipped step."""

    step: Number
    epoch: Number
    samples: Number
    name: str = ""
    """Name of the loss, if there are several."""
    gradient: bool = False
    """Whether the script made the update itself, with `Trainer.gradient`."""
    loss: float
    weight: float
    norm: float
    """Norm of the whole gradient before clipping; NaN if there is none."""
    skipped: str = ""
    """Reason why the update was skipped; empty if it was not."""
    rates: list[float]
    """Learning rate of each optimizer group in this step."""
    values: dict[str, float] = {}
    """Logged metrics: the values that the loss returned in addition to the loss."""
    outputs: list[str] = []
    """Names of the per-sample outputs of the loss."""
    rows: bytes = b""
    """Per-sample outputs, encoded by `onefold.core.encoding`; empty if they are too large."""
    place: list[tuple[int, int, int, int]] = []
    """Number of each loader, with its pass, the batch's end in the pass, and its samples."""
    totals: bytes
    """V float64: each shard's part of the loss, before the division by ``weight``."""
    weights: bytes
    """V float64: each shard's part of the denominator; negative if the shard has none."""
    digests: bytes = b""
    """V uint64: digests of each shard's gradient, all of the same elements."""
    time: float = 0.0
    """When the step was recorded, in seconds since 1970; 0 if the record has no times. Equality
    ignores it."""

    def __post_init__(self) -> None:
        size = len(self.totals)
        if size % 8 or len(self.weights) != size or len(self.digests) not in (0, size):
            raise ValueError("expected as many numbers of 8 bytes in totals, weights and digests")

    def __eq__(self, other: object) -> bool:
        return isinstance(other, StepEntry) and encode(replace(self, time=0.0)) == encode(
            replace(other, time=0.0)
        )


class FailureEntry(Struct, tag="failed", tag_field="kind", frozen=True, kw_only=True):
    """A step that raised an error which the script caught."""

    step: Number
    line: str
    """Location of the call in the script."""
    error: str
    """Name of the exception class, from `onefold.errors` or built in."""
    text: str


class Result(Struct, tag="result", tag_field="kind", frozen=True, kw_only=True):
    """The result of a call that the script made between two steps."""

    step: Number
    call: str
    """``evaluate``, ``predict``, ``gather`` or ``broadcast``."""
    line: str
    """Location of the call in the script."""
    value: bytes | None
    """The result, encoded by `onefold.core.encoding.encode`; None if too large to store."""
    digest: str
    """Digest of the result, even if the result itself is not stored."""


class BlockEntry(Struct, tag="modifying", tag_field="kind", frozen=True, kw_only=True):
    """The end of a `Trainer.modifying` block."""

    step: Number
    line: str
    """Location of the block in the script."""
    digest: int
    """Digest of a sample of each parameter and buffer at the end of the block."""


class SavedEntry(Struct, tag="checkpoint", tag_field="kind", frozen=True, kw_only=True):
    """The start of a checkpoint."""

    step: Number
    folder: str
    line: str = ""
    """Location of the call in the script; empty if the launcher requested the checkpoint."""


class AuditEntry(Struct, tag="audit", tag_field="kind", frozen=True, kw_only=True):
    """A wrong result found by an SDC check."""

    step: Number
    shard: int
    """Number of the shard; -1 for the update of a parameter partition."""
    devices: list[int]
    """Devices at fault: one, or two if the check cannot tell which."""
    persistent: bool
    healed: bool


class SameProcessEntry(Struct, tag="same_process", tag_field="kind", frozen=True, kw_only=True):
    """The point after which a single device runs SDC checks in its own process."""

    step: Number
    why: str


class HangEntry(Struct, tag="hang", tag_field="kind", frozen=True, kw_only=True):
    """A hang report from the launcher.

    It is outside the chain and is not counted as an entry.
    """

    step: Number
    text: str
    """Waiting devices and what they wait for, with the stacks of all processes."""


Found = AuditEntry | SameProcessEntry
"""Entries that SDC checks write."""
Entry = StartEntry | StepEntry | FailureEntry | Result | BlockEntry | SavedEntry | Found | HangEntry
_ENCODER = msgspec.msgpack.Encoder()
_DECODER: msgspec.msgpack.Decoder[Entry] = msgspec.msgpack.Decoder(Entry)


def encode(entry: Entry | list[tuple[int, Entry]]) -> bytes:
    """Encode an entry, or a list of numbered entries, as MessagePack."""
    return _ENCODER.encode(entry)


def decode(body: bytes, where: str) -> Entry:
    """Decode an entry.

    Raises:
        RecordError: the bytes are not an entry, or are of a later version; ``where`` names them.
    """
    try:
        return _DECODER.decode(body)
    except (msgspec.DecodeError, ValueError, RecursionError) as error:
        raise RecordError(f"{where} is not an entry that onefold can read: {error}") from None


def restore(value: bytes, step: int) -> Any:
    """Decode a recorded result of a step.

    Raises:
        RecordError: the bytes are not an encoded value, which happens only if the record is forged.
    """
    try:
        return encoding.decode(value)
    except ValueError as error:
        raise RecordError(
            f"{RECORD_FILE}, step {step}: the recorded result cannot be decoded: {error}. Use the "
            f"run's own record, or remove it to resume without replay"
        ) from None


HEAD = b"onefold\x02"
"""First bytes of a file of frames. The last byte is the format version."""

_log = logging.getLogger("onefold")
_DIGEST_BYTES = 16
_HEADER = struct.Struct(f"<II{_DIGEST_BYTES}s")
_INVERTED = 0xFFFFFFFF


class FrameWriter:
    """Appends frames to a file, which it creates if necessary.

    Args:
        path: the file, in an existing directory.

    Raises:
        OSError: the file cannot be written, is a symbolic link or is not a regular file.
        LaunchError: another process writes to it.
        RecordError: the file is not a record, or is damaged.
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
            """Number of frames in the chain, and the digest of the last one."""
            with open_plain(path) as file:
                for frame in _frames(path, file):
                    self.entries += bool(frame.head)
                    self.head, end = frame.head or self.head, frame.end
                size = os.fstat(file.fileno()).st_size
            end = end if size >= len(HEAD) else 0
            if size > end:
                _log.warning("%s: truncated %d bytes of a partial frame", path, size - end)
            os.ftruncate(self._file, end)
            if not end:
                write_all(self._file, HEAD)
        except BaseException:
            self.close()
            raise

    def append(self, body: bytes) -> None:
        """Append one frame to the chain.

        Raises:
            OSError: the write failed, because the disk is full for example. The frame does not
                count.
        """
        head = _digest(self.head, body)
        write_all(self._file, _frame(body, head))
        self.entries, self.head = self.entries + 1, head

    def sync(self) -> None:
        """Flush all frames to disk."""
        os.fdatasync(self._file)

    def close(self) -> None:
        """Close the file if it is open, and release its lock."""
        if self._file >= 0:
            os.close(self._file)
        self._file = -1
        self._lock.let_go()


def append_beside(path: Path, body: bytes) -> None:
    """Append a frame outside the chain, while another process may write the chain.

    Raises:
        OSError: the file cannot be written.
    """
    file = open_regular(path, os.O_WRONLY | os.O_APPEND)
    try:
        # A single O_APPEND write cannot land inside another process's frame.
        write_all(file, _frame(body, _digest(_BESIDE, body)))
    finally:
        os.close(file)


def _digest(previous: bytes, body: bytes) -> bytes:
    return hashlib.blake2b(previous + body, digest_size=_DIGEST_BYTES).digest()


_FIRST, _BESIDE = _digest(b"", HEAD), _digest(b"beside", HEAD)
"""Initial digests: of the chain, and of each frame beside it."""


def _frame(body: bytes, digest: bytes) -> bytes:
    return _HEADER.pack(len(body), len(body) ^ _INVERTED, digest) + body


class Frame(NamedTuple):
    """A complete frame of a file."""

    body: bytes
    head: bytes
    """Digest of the chain up to this frame; empty if the frame is beside the chain."""
    end: int
    """Offset of the frame's end in the file, in bytes."""


def read_frames(path: Path) -> tuple[list[Frame], int]:
    """Read all complete frames.

    Returns:
        The frames in order, and the number of bytes of the torn tail.

    Raises:
        OSError: the file cannot be read, or is not a regular file.
        RecordError: the file does not have this format, or is damaged before its end.
    """
    with open_plain(path) as file:
        frames = list(_frames(path, file))
        size = os.fstat(file.fileno()).st_size
    whole = frames[-1].end if frames else len(HEAD)
    return frames, size - whole if size >= len(HEAD) else size


def _frames(path: Path, file: BinaryIO) -> Iterator[Frame]:
    """Yield frames one at a time, because a file may be larger than memory."""
    start = file.read(len(HEAD))
    if start != HEAD:
        if HEAD.startswith(start):
            return
        raise RecordError(
            f"{path} is not a onefold record, or has another format version: expected it to begin "
            f"with {HEAD!r}, but got {start!r}"
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
            if _has_zeros_alone(file):  # a power failure can leave zeros
                return
            raise RecordError(
                f"{path} is damaged: the digest of the frame at byte {at} does not match its "
                f"content and position. The {number} frames before it are intact. To keep only "
                f"these, run truncate --size {at} {in_shell(path)}"
            )
        head = following if is_next else head
        at += _HEADER.size + length
        number += 1
        yield Frame(body, head if is_next else b"", at)


def _has_zeros_alone(file: BinaryIO) -> bool:
    """Whether the rest of a file contains only zeros."""
    return not any(chunk.strip(b"\0") for chunk in iter(lambda: file.read(1 << 20), b""))
