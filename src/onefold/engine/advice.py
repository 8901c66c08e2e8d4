"""What a user can do about errors that PyTorch raises while a shard is computed. Pure."""

from __future__ import annotations

import torch

__all__ = ["advice_on", "is_about_hooks", "is_shortage"]

_SHORTAGE = ("can't allocate memory", "not enough memory", "ALLOC_FAILED")
"""Words of errors that have no type of their own: PyTorch's on processors, and cuBLAS's."""


def is_shortage(error: BaseException) -> bool:
    """Whether an error says that memory is used up."""
    if isinstance(error, MemoryError | torch.OutOfMemoryError):
        return True
    return isinstance(error, RuntimeError) and any(sign in str(error) for sign in _SHORTAGE)


def is_about_hooks(error: BaseException) -> bool:
    """Whether an error says that hooks of saved tensors, by which parameters come, are refused."""
    return "support saved tensor hooks" in str(error)


def advice_on(error: Exception, *, samples: int, shards: int) -> str:
    """Say what can be done about an error of a shard; empty where PyTorch has said all.

    Args:
        error: what was raised.
        samples: number of samples in the shard.
        shards: how many shards every batch is cut into.
    """
    text = str(error)
    if is_shortage(error):
        return (
            f"a shard of {samples} sample{'' if samples == 1 else 's'} did not fit: run it in "
            f'pieces with Trainer(microbatch="auto") or a number of samples; or give Trainer more '
            f"than {shards} shards, a smaller batch_size or a lower precision. Each of these "
            f"changes the result. Or look for what else holds memory on this device"
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
    if is_about_hooks(error):
        return (
            "with --keep span devices that share no memory bring parameters while backward runs, "
            "by such hooks, which torch.func does not allow: use torch.autograd.grad in the loss, "
            "or --keep all"
        )
    return ""
