"""Where large tensors on the host lie; `onefold.system.file_memory` has other places."""

from __future__ import annotations

import torch

__all__ = ["DEFAULT_ALLOCATOR", "TensorAllocator"]


class TensorAllocator:
    """PyTorch's own memory."""

    apart: bool = False
    """Whether devices compute in other memory than this, so that what is kept here is a copy."""
    on_disk: bool = False
    """Whether what is large lies in a file."""

    def empty(self, nbytes: int) -> torch.Tensor:
        """(nbytes,) uint8 of any content, on the host."""
        return torch.empty(nbytes, dtype=torch.uint8)

    def zeros(self, nbytes: int) -> torch.Tensor:
        """(nbytes,) uint8 of zeros, on the host."""
        return torch.zeros(nbytes, dtype=torch.uint8)

    def like(self, tensor: torch.Tensor, dtype: torch.dtype | None = None) -> torch.Tensor:
        """A tensor of any content, with shape, device and dense strides of another one.

        Args:
            tensor: the other one.
            dtype: its dtype; if absent, that of the other one.
        """
        return torch.empty_like(tensor, dtype=dtype, requires_grad=False)

    def copy(self, tensor: torch.Tensor) -> torch.Tensor:
        """A copy of a tensor, with its dense strides."""
        return self.like(tensor).copy_(tensor)

    def kept(self, tensor: torch.Tensor) -> torch.Tensor:
        """The tensor itself if it lies here; else a copy that does."""
        return tensor

    def trim(self) -> None:
        """Give the system what the C library keeps of memory that was freed, if memory is short."""


DEFAULT_ALLOCATOR = TensorAllocator()
"""The allocator of all that need not lie elsewhere."""
