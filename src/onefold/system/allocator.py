"""Allocates large tensors on the host; `onefold.system.file_memory` allocates them in files."""

from __future__ import annotations

import torch

__all__ = ["DEFAULT_ALLOCATOR", "TensorAllocator"]


class TensorAllocator:
    """Allocates PyTorch's own memory."""

    apart: bool = False
    """Whether devices compute in other memory, so that tensors kept here are copies."""
    on_disk: bool = False
    """Whether large tensors are stored in a file."""

    def empty(self, nbytes: int) -> torch.Tensor:
        """Return uninitialized memory on the host, (nbytes,) uint8."""
        return torch.empty(nbytes, dtype=torch.uint8)

    def zeros(self, nbytes: int) -> torch.Tensor:
        """Return zeros on the host, (nbytes,) uint8."""
        return torch.zeros(nbytes, dtype=torch.uint8)

    def like(self, tensor: torch.Tensor, dtype: torch.dtype | None = None) -> torch.Tensor:
        """Return an uninitialized tensor with another one's shape, device and dense strides.

        Args:
            tensor: the other tensor.
            dtype: dtype of the result; by default that of ``tensor``.
        """
        return torch.empty_like(tensor, dtype=dtype, requires_grad=False)

    def copy(self, tensor: torch.Tensor) -> torch.Tensor:
        """Return a copy of a tensor, with dense strides."""
        return self.like(tensor).copy_(tensor)

    def kept(self, tensor: torch.Tensor) -> torch.Tensor:
        """Return the tensor itself if it is in this allocator's memory, else a copy that is."""
        return tensor

    def trim(self) -> None:
        """Return freed memory that the C library caches to the system, if memory is short."""


DEFAULT_ALLOCATOR = TensorAllocator()
"""Allocator of all tensors that may be stored in ordinary memory."""
