"""What a user can do about errors that PyTorch raises while a shard is computed. Pure."""

from __future__ import annotations

import torch

__all__ = ["advice_on"]


def advice_on(error: Exception, *, samples: int, shards: int) -> str:
    """Say what can be done about an error of a shard; empty where PyTorch has said all.

    Args:
        error: what was raised.
        samples: number of samples in the shard.
        shards: how many shards every batch is cut into.
    """
    text = str(error)
    if isinstance(error, torch.OutOfMemoryError):
        return (
            f"a shard of {samples} sample{'' if samples == 1 else 's'} did not fit: give Trainer "
            f"more than {shards} shards, a smaller batch_size, or a lower precision, each of which "
            f"changes the result; or look for what else holds memory on this device"
        )
    if "CUBLAS_WORKSPACE_CONFIG" in text:
        return (
            "onefold has set this variable, but cuBLAS was used before Trainer was made: make "
            "Trainer before anything is computed on a GPU, or set it before the script starts"
        )
    if "does not have a deterministic implementation" in text:
        return (
            "onefold uses kernels that repeat their bits and refuses others. "
            "Trainer(deterministic=False) allows them: results then differ by rounding, from run "
            "to run as well"
        )
    return ""
