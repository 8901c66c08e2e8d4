"""Writes tensors to a safetensors file as a stream, and seals it with a digest.

The library's own writer needs each tensor in one contiguous piece, and a digest would take another
pass over the file. Here a tensor may consist of several parts, as the devices of a run hold them.
Nothing is copied, and Python's global lock is released while bytes are hashed and written, so that
training continues in the meantime. The library reads the files.

Note: memory ownership
----------------------
The parts are views of memory that training overwrites later. The caller guarantees that they do not
change until `write_tensors` returns; no reference is kept after that.
"""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

import numpy as np
import torch
from msgspec import Meta, Struct

from onefold.system.accelerator import DTYPES
from onefold.system.safe_files import open_plain, write_all

__all__ = ["Seal", "TensorParts", "digest_file", "write_tensors"]

# (n,) uint8, contiguous.
Bytes = np.ndarray[tuple[int], np.dtype[np.uint8]]

_CHUNK_BYTES = 4 << 20
_ALIGNMENT_BYTES = 8


class Seal(Struct, frozen=True, forbid_unknown_fields=True):
    """Identifies the content of a file."""

    size: Annotated[int, Meta(ge=0, lt=1 << 62)]
    """Size in bytes."""
    sha256: Annotated[str, Meta(min_length=64, max_length=64)]
    """64 hexadecimal digits."""


@dataclass(frozen=True, slots=True)
class TensorParts:
    """A tensor on the host whose elements are stored in several contiguous parts."""

    name: str
    dtype: torch.dtype
    shape: tuple[int, ...]
    stride: tuple[int, ...]
    """Strides in elements, across all parts, of a dense tensor."""
    parts: Iterable[Bytes]
    """Bytes of all elements in memory order, part after part. The iterable may create them on
    demand, and is used once."""

    @classmethod
    def in_rows(
        cls, name: str, dtype: torch.dtype, shape: tuple[int, ...], parts: Iterable[Bytes]
    ) -> TensorParts:
        """Return a tensor whose elements are in row-major order already."""
        return cls(name, dtype, shape, _row_major(shape), parts)

    @property
    def nbytes(self) -> int:
        """Number of bytes of all elements."""
        return int(np.prod(self.shape, dtype=np.int64)) * self.dtype.itemsize

    def in_order(self) -> Iterable[Bytes]:
        """Return the bytes in row-major order (the last index changes fastest), as in the file."""
        if self.stride == _row_major(self.shape):
            return self.parts
        # Only tensors in another order, such as channels_last, are copied. They are viewed as
        # opaque elements of the same width, because NumPy lacks some of the dtypes.
        itemsize = self.dtype.itemsize
        elements = np.concatenate([*self.parts]).view(f"V{itemsize}")
        strides = tuple(step * itemsize for step in self.stride)
        moved = np.lib.stride_tricks.as_strided(elements, self.shape, strides)
        return [np.ascontiguousarray(moved).reshape(-1).view(np.uint8)]


def _row_major(shape: tuple[int, ...]) -> tuple[int, ...]:
    return tuple(torch.empty(shape, device="meta").stride())


def write_tensors(path: Path, tensors: Iterable[TensorParts]) -> Seal:
    """Write a new safetensors file. When this returns, the file is on the disk.

    Args:
        path: path of the file, which must not exist.
        tensors: tensors with different names.

    Raises:
        OSError: the file cannot be written; the message contains its path.
        ValueError: two tensors have the same name.
    """
    # Widest first, so that every tensor starts at a multiple of its element size.
    ordered = sorted(tensors, key=lambda tensor: (-tensor.dtype.itemsize, tensor.name))
    digest, size = hashlib.sha256(), 0
    try:
        # Unbuffered, because Python's buffer would copy every byte once more.
        with open(path, "xb", buffering=0) as file:
            for stretch in _stretches(ordered):
                digest.update(stretch)
                write_all(file.fileno(), stretch)
                size += len(stretch)
            # Some disks and network file systems report a lack of space only here.
            os.fsync(file.fileno())
    except OSError as error:
        raise OSError(error.errno, f"{path} could not be written: {error.strerror}") from error
    return Seal(size, digest.hexdigest())


def digest_file(path: Path, most_bytes: int) -> Seal:
    """Compute the seal that `write_tensors` returned, from the current content of the file.

    Args:
        path: path of a regular file.
        most_bytes: maximum size; a larger file is not read, and its digest is empty.

    Raises:
        OSError: the file cannot be read, or the path is a link, a FIFO or a device.
    """
    digest, size = hashlib.sha256(), 0
    with open_plain(path) as file:
        there = os.fstat(file.fileno()).st_size
        if there > most_bytes:
            return Seal(there, "")
        room = memoryview(bytearray(_CHUNK_BYTES))
        # If the file grows in the meantime, stop reading just beyond the limit.
        while size <= most_bytes and (came := file.readinto(room)):
            digest.update(room[:came])
            size += came
    return Seal(size, digest.hexdigest())


def _stretches(tensors: Sequence[TensorParts]) -> Iterator[memoryview]:
    yield memoryview(_header(tensors))
    for tensor in tensors:
        for part in tensor.in_order():
            whole = part.data
            # In chunks, so that each is still in the CPU cache when it is written.
            for start in range(0, len(whole), _CHUNK_BYTES):
                yield whole[start : start + _CHUNK_BYTES]


def _header(tensors: Sequence[TensorParts]) -> bytes:
    places: dict[str, Any] = {}
    start = 0
    for tensor in tensors:
        if tensor.name in places:
            raise ValueError(f"two tensors of a file have the same name, {tensor.name}")
        stop = start + tensor.nbytes
        places[tensor.name] = {
            "dtype": DTYPES[tensor.dtype],
            "shape": list(tensor.shape),
            "data_offsets": [start, stop],
        }
        start = stop
    text = json.dumps(places, separators=(",", ":")).encode()
    # Pad with spaces, as the format allows, so that the first tensor starts at a multiple of 8.
    text += b" " * (-len(text) % _ALIGNMENT_BYTES)
    return len(text).to_bytes(8, "little") + text
