"""Makes this process keep the memory that it was once given, so that every step finds it ready.

Note: why memory is kept
------------------------
By default the C library asks the system anew for every large block and hands it back at once. A
training step frees and allocates the same activations and gradients over and over, and the system
clears every page of them first: on a processor this costs up to a quarter of a step. With the first
two settings here, freed blocks stay in the process and are used again, as PyTorch itself does on a
GPU. The peak is what it was, or little more; what is left at the end of a step is no longer given
back.

Threads share one heap. Shards that take turns (`onefold.gather`) compute in threads of their own,
of which each would otherwise have a heap that keeps what the shard has freed, out of reach of the
next one. It holds for heaps that are not there yet, so for all threads but the first few.
"""

from __future__ import annotations

import ctypes
import functools
import logging

from onefold.run.world import allocator_chosen

__all__ = ["keep_memory", "return_memory"]

_log = logging.getLogger("onefold")
_M_TRIM_THRESHOLD = -1  # of mallopt(3)
_M_MMAP_MAX = -4
_M_MMAP_THRESHOLD = -3
_M_ARENA_MAX = -8
_LARGE_BYTES = 1 << 16
"""What is larger goes back to the system as soon as it is freed, where memory is short: so do the
pieces of all but small models."""


@functools.cache
def keep_memory() -> bool:
    """Have the C library keep freed memory, for good; return whether it does.

    Nothing is changed where the user has chosen an allocator or its settings (see
    `onefold.run.world.allocator_chosen`), and where the C library is not glibc.
    """
    if allocator_chosen():
        return False
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    if mallopt is None:
        return False
    # No block by mmap, as these are handed back one by one; and the heap's top is never trimmed.
    kept = bool(mallopt(_M_MMAP_MAX, 0)) and bool(mallopt(_M_TRIM_THRESHOLD, -1))
    mallopt(_M_ARENA_MAX, 1)
    if not kept:
        _log.info("the C library does not let this process keep its memory; steps take longer")
    return kept


@functools.cache
def return_memory() -> None:
    """Have the C library hand back what is freed, for a model that is larger than memory.

    By default it begins to keep blocks of a size once it has seen one of them freed.
    """
    mallopt = None if allocator_chosen() else getattr(ctypes.CDLL(None), "mallopt", None)
    if mallopt is not None:
        mallopt(_M_MMAP_THRESHOLD, _LARGE_BYTES)
        mallopt(_M_TRIM_THRESHOLD, _LARGE_BYTES)
