"""Memory that processes of a host share: a file without a name, handed over by descriptor.

Note: how long it lives
-----------------------
The kernel frees the file once nobody has it open or mapped, whatever ended the processes, so
nothing can be left behind. A mapping lasts without its descriptor, and the tensor keeps the mapping
alive: so a receiver closes the descriptor at once, and holds the memory for as long as any view of
the tensor exists. A mapping does not grow with its file, so whoever needs more makes a new one.
"""

from __future__ import annotations

import mmap
import os

import torch

from onefold.exchange.mailbox import Mailbox
from onefold.system.heap import ORDINARY, DiskHeap, Heap, new_disk_file
from onefold.system.limits import naming_limits
from onefold.system.ownfiles import memory_file

__all__ = ["memory_of", "new_file", "take_file"]


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
