"""Writes tensors to a safetensors file as a stream, and seals it with a digest.

The library's own writer needs every tensor whole and in one stretch, and the digest would take a
second look at the file. Here a tensor may lie in parts, as the devices of a run hold them; nothing
is copied, and Python's lock is let go of while bytes are hashed and written, so that training goes
on beside it. Reading is the library's.
"""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch

from onefold.system.plainfile import open_plain

__all__ = ["DTYPES", "Seal", "TensorParts", "digest_file", "write_tensors"]

Bytes = np.ndarray[tuple[int], np.dtype[np.uint8]]

_CHUNK_BYTES = 4 << 20
_ALIGNMENT_BYTES = 8

DTYPES = {
    torch.float64: "F64",
    torch.float32: "F32",
    torch.float16: "F16",
    torch.bfloat16: "BF16",
    torch.complex64: "C64",
    torch.int64: "I64",
    torch.int32: "I32",
    torch.int16: "I16",
    torch.int8: "I8",
    torch.uint64: "U64",
    torch.uint32: "U32",
    torch.uint16: "U16",
    torch.uint8: "U8",
    torch.bool: "BOOL",
    torch.float8_e4m3fn: "F8_E4M3",
    torch.float8_e5m2: "F8_E5M2",
}
"""What the format has room for, with its names there."""


@dataclass(frozen=True, slots=True)
class Seal:
    """Tells a file from every other one."""

    size: int
    """Bytes."""
    sha256: str
    """64 hexadecimal digits."""


@dataclass(frozen=True, slots=True)
class TensorParts:
    """A tensor on the host whose elements lie in several stretches of memory."""

    name: str
    dtype: torch.dtype
    shape: tuple[int, ...]
    stride: tuple[int, ...]
    """Of the elements, counted through all parts: those of a dense tensor."""
    parts: Sequence[Bytes]
    """One after the other, the bytes of all elements in the order in which they lie in memory."""

    @property
    def nbytes(self) -> int:
        """Bytes of all elements."""
        return int(np.prod(self.shape, dtype=np.int64)) * self.dtype.itemsize

    def in_order(self) -> Iterable[Bytes]:
        """The bytes with the last index changing fastest, as the format wants them."""
        if self.stride == torch.empty(self.shape, device="meta").stride():
            return self.parts
        itemsize = self.dtype.itemsize
        elements = np.concatenate(self.parts).view(f"V{itemsize}")
        strides = tuple(step * itemsize for step in self.stride)
        moved = np.lib.stride_tricks.as_strided(elements, self.shape, strides)
        return [np.ascontiguousarray(moved).reshape(-1).view(np.uint8)]


def write_tensors(path: Path, tensors: Iterable[TensorParts]) -> Seal:
    """Write a new safetensors file and have it on the disk when this returns.

    Args:
        path: of a file that is not there yet.
        tensors: of different names.

    Raises:
        OSError: it could not be written; the message names the file.
        ValueError: a name comes twice.
    """
    # Widest first: then every tensor begins at a multiple of its own element size.
    ordered = sorted(tensors, key=lambda tensor: (-tensor.dtype.itemsize, tensor.name))
    digest, size = hashlib.sha256(), 0
    try:
        with open(path, "xb", buffering=0) as file:
            for stretch in _stretches(ordered):
                digest.update(stretch)
                _write_all(file.fileno(), stretch)
                size += len(stretch)
            os.fsync(file.fileno())
    except OSError as error:
        raise OSError(error.errno, f"{path} could not be written: {error.strerror}") from error
    return Seal(size, digest.hexdigest())


def digest_file(path: Path, most_bytes: int) -> Seal:
    """What `write_tensors` said of a file, from the file as it is now.

    Args:
        path: of a regular file.
        most_bytes: a larger file is not read; its digest is then empty.

    Raises:
        OSError: it could not be read, or is a link, a FIFO or a device.
    """
    digest, size = hashlib.sha256(), 0
    with open_plain(path) as file:
        there = os.fstat(file.fileno()).st_size
        if there > most_bytes:
            return Seal(there, "")
        room = memoryview(bytearray(_CHUNK_BYTES))
        # One that grows meanwhile is read no further than just beyond its limit.
        while size <= most_bytes and (came := file.readinto(room)):
            digest.update(room[:came])
            size += came
    return Seal(size, digest.hexdigest())


def _stretches(tensors: Sequence[TensorParts]) -> Iterator[memoryview]:
    yield memoryview(_header(tensors))
    for tensor in tensors:
        for part in tensor.in_order():
            whole = part.data
            for start in range(0, len(whole), _CHUNK_BYTES):
                yield whole[start : start + _CHUNK_BYTES]


def _header(tensors: Sequence[TensorParts]) -> bytes:
    places: dict[str, Any] = {}
    start = 0
    for tensor in tensors:
        if tensor.name in places:
            raise ValueError(f"two tensors of a file are called {tensor.name}")
        stop = start + tensor.nbytes
        places[tensor.name] = {
            "dtype": DTYPES[tensor.dtype],
            "shape": list(tensor.shape),
            "data_offsets": [start, stop],
        }
        start = stop
    text = json.dumps(places, separators=(",", ":")).encode()
    text += b" " * (-len(text) % _ALIGNMENT_BYTES)
    return len(text).to_bytes(8, "little") + text


def _write_all(descriptor: int, stretch: memoryview) -> None:
    while stretch:
        stretch = stretch[os.write(descriptor, stretch) :]
