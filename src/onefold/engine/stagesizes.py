"""Refuses stages that no device can have."""

from __future__ import annotations

import torch

from onefold.core.storage import Storage
from onefold.system.capacity import capacity_bytes

__all__ = ["refuse_large_stages"]


def refuse_large_stages(storage: Storage, device: torch.device, *, on_disk: bool) -> None:
    """Refuse a stage whose parameters and their gradient are more than a device has.

    Args:
        storage: the sizes of the run.
        device: one of them.
        on_disk: whether parameters lie in a file, so that only the gradient must fit.

    Raises:
        ValueError: there is one; the message names it, and both sizes.
    """
    if storage.stages is None:
        return
    held = storage.lent_layout().stage_bytes
    pairs = zip(storage.stage_layout().stage_bytes, held, strict=True)
    needed = [gradient + (0 if on_disk else values) for gradient, values in pairs]
    largest = max(range(len(needed)), key=needed.__getitem__)
    capacity = capacity_bytes(device)
    if needed[largest] > capacity:
        what = "gradient" if on_disk else "parameters and gradient"
        raise ValueError(
            f"stage {storage.stages.names[largest]} is larger than a device: expected at most "
            f"{capacity:,} bytes, which {device} has, got {needed[largest]:,} bytes of {what}. Cut "
            f"it with Trainer(stages=[...]), or its largest layer with onefold.Sliced; `onefold "
            f"plan` shows all stages"
        )
