"""What a user chose for a run, checked."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Literal

from onefold.core.numbers import check_positive, check_seconds, check_whole

__all__ = ["BufferRule", "Settings"]

BufferRule = Literal["mean", "max", "sum", "first"]
"""What becomes of a buffer that shards change."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Settings:
    """What a user chose for a run."""

    shards: int
    """How many shards every batch is cut into."""
    seed: int
    """Of all randomness."""
    clip_norm: float | None
    """The largest norm of the whole gradient."""
    deterministic: bool
    """Refuse kernels that do not repeat their bits."""
    timeout_s: float
    """The longest wait for another device."""
    threads: int | None
    """Of each CPU device; None for an even share of the cores to each shard."""
    buffers: Mapping[str, BufferRule] = field(default_factory=dict)
    """What becomes of buffers, by name or pattern, where it is not the rule of their type."""

    def __post_init__(self) -> None:
        check_seconds("timeout_s", self.timeout_s)
        check_whole("shards", self.shards, least=1, most=2**31)
        check_whole("seed", self.seed, least=-(2**63), most=2**63 - 1)
        if self.threads is not None:
            check_whole("threads", self.threads, least=1, most=2**31)
        if self.clip_norm is not None:
            check_positive("clip_norm", self.clip_norm)
