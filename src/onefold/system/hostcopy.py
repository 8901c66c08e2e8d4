"""Copies a device's numbers to the host without waiting for the device."""

from __future__ import annotations

import torch

__all__ = ["HostCopy"]


class HostCopy:
    """A device's values on their way to the host, where nobody waits until they are read.

    Args:
        values: on any device; they may be overwritten afterwards.

    >>> HostCopy(torch.ones(2)).read()
    tensor([1., 1.])
    """

    def __init__(self, values: torch.Tensor) -> None:
        self._there: torch.cuda.Event | None = None
        if values.device.type == "cpu":
            self._values = values.clone()
            return
        # Pinned, or the host would wait; PyTorch uses this memory again only after the copy.
        self._values = torch.empty(values.shape, dtype=values.dtype, pin_memory=True)
        self._values.copy_(values, non_blocking=True)
        self._there = torch.cuda.Event()  # type: ignore[no-untyped-call]
        self._there.record(torch.cuda.current_stream(values.device))

    def read(self) -> torch.Tensor:
        """Return the values on the host, once they are there."""
        if self._there is not None:
            # For the copy alone, and not for what was queued behind it.
            self._there.synchronize()
        return self._values
