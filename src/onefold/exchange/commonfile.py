"""Memory that processes of a host share: a file without a name, handed over by descriptor.

There is nothing that could be left behind, and the kernel frees it with the last process.
"""

from __future__ import annotations

import mmap
import os

import torch

from onefold.exchange.mailbox import Mailbox

__all__ = ["memory_of", "new_file", "take_file"]


def new_file(size_bytes: int) -> tuple[int, torch.Tensor]:
    """A file without a name, and its memory: (size,) uint8 of zeros.

    Pages that nobody touches take no memory.
    """
    descriptor = os.memfd_create("onefold", os.MFD_CLOEXEC)
    try:
        os.ftruncate(descriptor, max(size_bytes, 1))
        return descriptor, memory_of(descriptor)
    except OSError as error:
        os.close(descriptor)
        raise OSError(
            error.errno,
            f"expected {size_bytes:,} bytes of memory that all devices of this host share, got: "
            f"{error.strerror}. The limits for files (ulimit -f) and for memory hold for it",
        ) from error
    except BaseException:
        os.close(descriptor)
        raise


def take_file(mailbox: Mailbox, rank: int) -> torch.Tensor:
    """The memory of a file that another process sends."""
    descriptor = mailbox.receive_file(rank)
    try:
        return memory_of(descriptor)
    finally:
        os.close(descriptor)


def memory_of(descriptor: int) -> torch.Tensor:
    """(size,) uint8: the memory of an open file."""
    size_bytes = os.fstat(descriptor).st_size
    return torch.frombuffer(mmap.mmap(descriptor, size_bytes), dtype=torch.uint8)
