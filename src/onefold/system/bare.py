"""Memory that takes no room until it is provided, and is not a number in the meantime.

Note: what is read too early
----------------------------
Nobody is to read such memory before `BareMemory.provide`, and all that goes through PyTorch's
functions is kept from it. What goes past them (a compiled extension, an address) must not find
zeros, which look like values. So one small piece of memory, each byte of which is 0xFF, is mapped
again and again: that is a NaN in every floating point dtype, and -1 in integers. Written to, a page
becomes the writer's own.
"""

from __future__ import annotations

import ctypes
import mmap
import os
import weakref
from pathlib import Path

import torch

from onefold.system.heap import new_disk_file, warn_of_memory
from onefold.system.limits import naming_limits
from onefold.system.ownfiles import memory_file

__all__ = ["BareMemory"]

_PIECE_BYTES = 4 << 20
"""A process may have some 65,000 mappings."""
_MAP_FIXED = 0x10
_FAILED = ctypes.c_void_p(-1).value


class BareMemory:
    """Tensors without room, which is made in files without names when they are to have values.

    Args:
        folder: where the files are.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self._unknown = memory_file()
        weakref.finalize(self, os.close, self._unknown)
        with naming_limits(f"{_PIECE_BYTES:,} bytes of memory without values"):
            os.ftruncate(self._unknown, _PIECE_BYTES)
        with mmap.mmap(self._unknown, _PIECE_BYTES) as piece:
            piece[:] = b"\xff" * _PIECE_BYTES
        self._warned = False

    def room(self, nbytes: int) -> torch.Tensor:
        """(nbytes,) uint8 of 0xFF, to be read and written by nobody before `provide`.

        Raises:
            OSError: this process may have no more memory, or mappings.
        """
        size = -(-max(nbytes, 1) // mmap.PAGESIZE) * mmap.PAGESIZE
        with naming_limits(f"{size:,} bytes for a tensor without values"):
            memory = torch.frombuffer(mmap.mmap(-1, size), dtype=torch.uint8)
        for start in range(0, size, _PIECE_BYTES):
            length = min(_PIECE_BYTES, size - start)
            _map_over(memory.data_ptr() + start, length, mmap.MAP_PRIVATE, self._unknown)
        return memory[:nbytes]

    def provide(self, memory: torch.Tensor) -> None:
        """Make room on the disk for what `room` has returned: it holds zeros now.

        Raises:
            OSError: the disk has no room.
        """
        if not self._warned:
            warn_of_memory(self.folder)
        self._warned = True
        size = memory.untyped_storage().nbytes()
        file = new_disk_file(self.folder, size)
        try:
            _map_over(memory.untyped_storage().data_ptr(), size, mmap.MAP_SHARED, file)
        finally:
            os.close(file)  # the mapping keeps it


def _map_over(address: int, nbytes: int, kind: int, descriptor: int) -> None:
    """Map the beginning of a file in the place of memory that this process has mapped before."""
    library = ctypes.CDLL(None, use_errno=True)
    library.mmap.restype = ctypes.c_void_p
    library.mmap.argtypes = (
        *(ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int, ctypes.c_int, ctypes.c_int),
        ctypes.c_long,
    )
    access = mmap.PROT_READ | mmap.PROT_WRITE
    found = library.mmap(address, nbytes, access, kind | _MAP_FIXED, descriptor, 0)
    if found == _FAILED:
        number = ctypes.get_errno()
        with naming_limits(f"{nbytes:,} bytes of a file to be mapped"):
            raise OSError(number, os.strerror(number))
