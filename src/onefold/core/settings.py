"""The settings that a user chose for a run, checked."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Literal

from onefold.core.numbers import check_positive, check_seconds, check_whole

__all__ = ["BufferRule", "Settings"]

BufferRule = Literal["mean", "max", "sum", "first"]
"""How the values that shards leave in a buffer become one."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Settings:
    """The settings that a user chose for a run."""

    shards: int
    """How many shards every batch is cut into."""
    seed: int
    """The seed of all randomness."""
    clip_norm: float | None
    """The largest norm that the whole gradient may have; None for no limit."""
    deterministic: bool
    """Whether kernels that do not repeat their bits are refused."""
    timeout_s: float
    """The longest wait for another device."""
    threads: int | None
    """Threads of each CPU device; None gives each shard an even share of the cores."""
    buffers: Mapping[str, BufferRule] = field(default_factory=dict)
    """The rule for buffers, by name or pattern, where it differs from that of their dtype."""

    def __post_init__(self) -> None:
        check_seconds("timeout_s", self.timeout_s)
        check_whole("shards", self.shards, least=1, most=2**31)
        # The bounds are those of the signed 64-bit numbers from which seeds are derived.
        check_whole("seed", self.seed, least=-(2**63), most=2**63 - 1)
        if self.threads is not None:
            check_whole("threads", self.threads, least=1, most=2**31)
        if self.clip_norm is not None:
            check_positive("clip_norm", self.clip_norm)
