"""Writes tensors to a safetensors file as a stream, and seals it with a digest.

The library's own writer needs every tensor whole and in one stretch, and a digest would take
another pass over the file. Here a tensor may lie in parts, as the devices of a run hold them;
nothing is copied, and Python's global lock is released while bytes are hashed and written, so that
training continues meanwhile. Reading is left to the library.

Note: who owns the bytes
------------------------
The parts are views of memory that training will write to again. The caller guarantees that they
stay as they are until `write_tensors` returns; nothing here keeps them beyond that.
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
    """A tensor on the host whose elements lie in several stretches of memory."""

    name: str
    dtype: torch.dtype
    shape: tuple[int, ...]
    stride: tuple[int, ...]
    """Strides in elements, counted through all parts; those of a dense tensor."""
    parts: Iterable[Bytes]
    """The bytes of all elements in the order in which they lie in memory, part after part; may be
    made only when they are asked for, once."""

    @classmethod
    def in_rows(
        cls, name: str, dtype: torch.dtype, shape: tuple[int, ...], parts: Iterable[Bytes]
    ) -> TensorParts:
        """A tensor whose elements lie in row-major order already."""
        return cls(name, dtype, shape, _row_major(shape), parts)

    @property
    def nbytes(self) -> int:
        """Number of bytes of all elements."""
        return int(np.prod(self.shape, dtype=np.int64)) * self.dtype.itemsize

    def in_order(self) -> Iterable[Bytes]:
        """The bytes in row-major order (the last index changes fastest), as the format has them."""
        if self.stride == _row_major(self.shape):
            return self.parts
        # Only such a tensor, channels_last for one, is copied. As opaque elements of its width:
        # NumPy lacks some of the dtypes.
        itemsize = self.dtype.itemsize
        elements = np.concatenate([*self.parts]).view(f"V{itemsize}")
        strides = tuple(step * itemsize for step in self.stride)
        moved = np.lib.stride_tricks.as_strided(elements, self.shape, strides)
        return [np.ascontiguousarray(moved).reshape(-1).view(np.uint8)]


def _row_major(shape: tuple[int, ...]) -> tuple[int, ...]:
    return tuple(torch.empty(shape, device="meta").stride())


def write_tensors(path: Path, tensors: Iterable[TensorParts]) -> Seal:
    """Write a new safetensors file; it is on the disk when this returns.

    Args:
        path: path of the file, which must not exist yet.
        tensors: tensors with different names.

    Raises:
        OSError: the file could not be written; the message names it.
        ValueError: two tensors have the same name.
    """
    # Widest first: then every tensor begins at a multiple of its own element size.
    ordered = sorted(tensors, key=lambda tensor: (-tensor.dtype.itemsize, tensor.name))
    digest, size = hashlib.sha256(), 0
    try:
        # Unbuffered: Python's buffer would copy every byte once more.
        with open(path, "xb", buffering=0) as file:
            for stretch in _stretches(ordered):
                digest.update(stretch)
                write_all(file.fileno(), stretch)
                size += len(stretch)
            # Some disks and network file systems report only here that there was no room.
            os.fsync(file.fileno())
    except OSError as error:
        raise OSError(error.errno, f"{path} could not be written: {error.strerror}") from error
    return Seal(size, digest.hexdigest())


def digest_file(path: Path, most_bytes: int) -> Seal:
    """Compute the seal that `write_tensors` returned, from the file as it is now.

    Args:
        path: path of a regular file.
        most_bytes: a file larger than this is not read; its digest is empty.

    Raises:
        OSError: the file could not be read, or the path is a link, a FIFO or a device.
    """
    digest, size = hashlib.sha256(), 0
    with open_plain(path) as file:
        there = os.fstat(file.fileno()).st_size
        if there > most_bytes:
            return Seal(there, "")
        room = memoryview(bytearray(_CHUNK_BYTES))
        # A file that grows meanwhile is read no further than just beyond the limit.
        while size <= most_bytes and (came := file.readinto(room)):
            digest.update(room[:came])
            size += came
    return Seal(size, digest.hexdigest())


def _stretches(tensors: Sequence[TensorParts]) -> Iterator[memoryview]:
    yield memoryview(_header(tensors))
    for tensor in tensors:
        for part in tensor.in_order():
            whole = part.data
            # In chunks, which are hashed and written while they lie in the cache.
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
    # Padded with blanks, as the format allows, so that the first tensor begins at a multiple of 8.
    text += b" " * (-len(text) % _ALIGNMENT_BYTES)
    return len(text).to_bytes(8, "little") + text
