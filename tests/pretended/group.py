"""Exchange between processes with pretended accelerators, as NCCL has it.

The backend ``pretended-nccl`` of `torch.distributed` allows what NCCL allows, and nothing else:
only tensors of a device, which is another one in each process; the same order of operations on both
sides; at most 2,048 operations in a group. See ``source/group.cpp``.
"""

from datetime import timedelta
from typing import Any

import torch.distributed as dist

__all__ = ["BACKEND", "register"]

BACKEND = "pretended-nccl"


def register(extension: Any, kind: str) -> None:
    """Have PyTorch use it between devices of a kind."""

    def make(store: dist.Store, rank: int, size: int, timeout: timedelta) -> dist.Backend:
        own = dist.PrefixStore("pretended", store)
        gloo = dist.ProcessGroupGloo(dist.PrefixStore("gloo", own), rank, size, timeout)
        group: dist.Backend = extension.Group(gloo, own, rank, size)
        return group

    dist.Backend.register_backend(BACKEND, make, devices=[kind])
