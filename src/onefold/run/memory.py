"""Has this process keep the memory that it once got, so that every step finds it ready.

Note: why
---------
By default the C library asks the system anew for every large block and hands it back at once. A
training step frees and allocates the same activations and gradients over and over, and the system
clears every page of them first: on a processor this costs up to a quarter of a step. With the two
settings here, freed blocks stay in the process and are used again, as PyTorch itself does on a GPU.
The peak is what it was, or little more; what is left at the end of a step is no longer given back.
"""

from __future__ import annotations

import ctypes
import functools
import logging

from onefold.run.world import allocator_chosen

__all__ = ["keep_memory"]

_log = logging.getLogger("onefold")
_M_TRIM_THRESHOLD = -1  # of mallopt(3)
_M_MMAP_MAX = -4


@functools.cache
def keep_memory() -> bool:
    """Make the settings, for good; whether they were made.

    Left alone where the user has chosen an allocator or its settings (see
    `onefold.run.world.allocator_chosen`), and where the C library is not glibc.
    """
    if allocator_chosen():
        return False
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    if mallopt is None:
        return False
    kept = bool(mallopt(_M_MMAP_MAX, 0)) and bool(mallopt(_M_TRIM_THRESHOLD, -1))
    if not kept:
        _log.info("the C library does not let this process keep its memory; steps take longer")
    return kept
