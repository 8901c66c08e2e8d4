"""Knows when a device has run out of memory."""

from __future__ import annotations

import torch

__all__ = ["ADVICE", "is_shortage"]

ADVICE = (
    "the device's memory is too small for a shard: run it in pieces with "
    'Trainer(microbatch="auto") or a number of samples, or cut the batch into more shards'
)
_SIGNS = ("can't allocate memory", "not enough memory", "ALLOC_FAILED")
"""Words of errors that PyTorch raises without a type of their own, on processors and by cuBLAS."""


def is_shortage(error: BaseException) -> bool:
    """Whether an error says that memory is used up."""
    if isinstance(error, MemoryError | torch.OutOfMemoryError):
        return True
    return isinstance(error, RuntimeError) and any(sign in str(error) for sign in _SIGNS)
