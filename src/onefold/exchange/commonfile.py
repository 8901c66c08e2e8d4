"""Memory that processes of a host share: a file without a name, handed over by descriptor.

Note: how long it lives
-----------------------
The kernel frees the file once nobody has it open or mapped, whatever ended the processes, so
nothing can be left behind. A mapping lasts without its descriptor, and the tensor keeps the mapping
alive: so a receiver closes the descriptor at once, and holds the memory for as long as any view of
the tensor exists. A mapping does not grow with its file, so whoever needs more makes a new one.

Note: how it becomes a process's own
------------------------------------
Other memory is mapped over the very same addresses (`make_own`). So it holds for everything that
refers to it: parameters, tied ones, and what a script has kept of a ``state_dict()``.
"""

from __future__ import annotations

import ctypes
import mmap
import os

import torch

from onefold.exchange.mailbox import Mailbox
from onefold.system.heap import ORDINARY, DiskHeap, Heap, new_disk_file
from onefold.system.limits import naming_limits
from onefold.system.ownfiles import memory_file

__all__ = ["make_own", "memory_of", "new_file", "take_file"]


_MAP_FIXED = 0x10
"""As Linux has it on all processors that PyTorch runs on; Python does not name it."""


def new_file(size_bytes: int, heap: Heap = ORDINARY) -> tuple[int, torch.Tensor]:
    """Make a file without a name, and map it: its descriptor and (size,) uint8 of zeros.

    Pages that nobody touches take no memory. The caller closes the descriptor.

    Args:
        size_bytes: of the file.
        heap: if it is on a disk, the file is there as well; else it is in memory.
    """
    if isinstance(heap, DiskHeap):
        descriptor = new_disk_file(heap.folder, max(size_bytes, 1))
    else:
        descriptor = memory_file()
    try:
        with naming_limits(f"{size_bytes:,} bytes of memory that all devices of this host share"):
            # At least a byte: an empty file cannot be mapped.
            os.ftruncate(descriptor, max(size_bytes, 1))
            return descriptor, memory_of(descriptor)
    except BaseException:
        os.close(descriptor)
        raise


def take_file(mailbox: Mailbox, rank: int) -> torch.Tensor:
    """Receive a file from another process, and map it: (size,) uint8."""
    descriptor = mailbox.receive_file(rank)
    try:
        return memory_of(descriptor)
    finally:
        os.close(descriptor)


def memory_of(descriptor: int) -> torch.Tensor:
    """Map an open file as (size,) uint8, shared with everybody else who maps it."""
    size_bytes = os.fstat(descriptor).st_size
    return torch.frombuffer(mmap.mmap(descriptor, size_bytes), dtype=torch.uint8)


def make_own(memory: torch.Tensor, heap: Heap = ORDINARY) -> None:
    """Have other processes no longer see what is written to shared memory, nor this one theirs.

    Its values stay, and its address. Nobody may write to it meanwhile.

    Args:
        memory: (size,) uint8, a mapping that begins on a page.
        heap: if it is on a disk, the values then lie in a file of this process there.

    Raises:
        OSError: there is no room for a copy.
    """
    if not memory.numel():
        return
    if isinstance(heap, DiskHeap):
        descriptor, copy = new_file(memory.numel(), heap)
        copy.copy_(memory)
        flags = mmap.MAP_SHARED
    else:
        descriptor, copy, flags = -1, memory.clone(), mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS
    try:
        _map_over(memory, flags, descriptor)
    finally:
        if descriptor >= 0:
            os.close(descriptor)
    if descriptor < 0:
        memory.copy_(copy)


def _map_over(memory: torch.Tensor, flags: int, descriptor: int) -> None:
    """Map something else where a mapping is; Python's object for that will unmap it as well."""
    libc = ctypes.CDLL(None, use_errno=True)
    libc.mmap.restype = ctypes.c_void_p
    libc.mmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t, *[ctypes.c_int] * 3, ctypes.c_long]
    access = mmap.PROT_READ | mmap.PROT_WRITE
    address = memory.data_ptr()
    found = libc.mmap(address, memory.numel(), access, flags | _MAP_FIXED, descriptor, 0)
    if found != address:
        number = ctypes.get_errno()
        raise OSError(number, f"{os.strerror(number)}: no room for a copy of the model")
