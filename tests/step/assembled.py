"""Replicas and engines put together without a trainer."""

from collections.abc import Sequence
from typing import Any

import torch

from onefold.core.assignment import Devices
from onefold.core.options import LaunchContext
from onefold.core.settings import Settings

CPU = torch.device("cpu")


def bytes_of(tensor: torch.Tensor | None) -> bytes | None:
    if tensor is None:
        return None
    return tensor.detach().contiguous().reshape(-1).view(torch.uint8).numpy().tobytes()


def devices_of(devices: int = 1, *, own: Sequence[int] | None = None, trainer: int = 0) -> Devices:
    return Devices(
        all=(CPU,) * devices,
        own=tuple(range(devices) if own is None else own),
        context=LaunchContext(),
        trainer=trainer,
    )


def settings_of(*, shards: int = 4, **others: Any) -> Settings:
    """A user's choices, most of them the defaults."""
    choices: dict[str, Any] = {
        "seed": 0,
        "clip_norm": None,
        "deterministic": True,
        "timeout_s": 10.0,
        "threads": 1,
        **others,
    }
    return Settings(shards=shards, **choices)
