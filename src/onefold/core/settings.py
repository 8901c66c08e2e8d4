"""The settings that a user chose for a run, checked."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Literal, get_args

from onefold.core.numbers import check_positive, check_seconds, check_whole
from onefold.core.precision import AS_GIVEN, Precision

__all__ = ["BufferRule", "Microbatch", "OnNonfinite", "ScheduleEvery", "Settings"]

BufferRule = Literal["mean", "max", "sum", "first", "shard"]
"""How the values that shards leave in a buffer become one."""

OnNonfinite = Literal["raise", "skip"]
"""What becomes of a step with a loss or a gradient that is not finite."""

Microbatch = int | Literal["auto"]
"""The most samples of a shard that run at once; found in the first steps if it is ``"auto"``."""

ScheduleEvery = Literal["step", "epoch", "script"]
"""After what the schedule of learning rates is stepped, or that the script does it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Settings:
    """The settings that a user chose for a run."""

    shards: int
    """How many shards every batch is cut into."""
    seed: int
    """The seed of all randomness."""
    clip_norm: float | None
    """The largest norm that the whole gradient may have; None for no limit."""
    clip_value: float | None = None
    """The largest magnitude that an element of the gradient may have; None for no limit."""
    precision: Precision = AS_GIVEN
    """What is computed in which dtype."""
    on_nonfinite: OnNonfinite = "raise"
    """What becomes of a step with a loss or a gradient that is not finite."""
    microbatch: Microbatch | None = None
    """The most samples of a shard that run at once; None for all of them."""
    compile: bool = False
    """Whether the model and the loss of a shard are compiled together."""
    deterministic: bool
    """Whether kernels that do not repeat their bits are refused."""
    timeout_s: float
    """The longest wait for another device."""
    threads: int | None
    """Threads of each CPU device; None gives each shard an even share of the cores."""
    buffers: Mapping[str, BufferRule] = field(default_factory=dict)
    """The rule for buffers, by name or pattern, where it differs from that of their dtype."""
    schedule_every: ScheduleEvery = "step"
    """When the schedule of learning rates is stepped."""

    def __post_init__(self) -> None:
        check_seconds("timeout_s", self.timeout_s)
        check_whole("shards", self.shards, least=1, most=2**31)
        # The bounds are those of the signed 64-bit numbers from which seeds are derived.
        check_whole("seed", self.seed, least=-(2**63), most=2**63 - 1)
        if self.threads is not None:
            check_whole("threads", self.threads, least=1, most=2**31)
        if self.clip_norm is not None:
            check_positive("clip_norm", self.clip_norm)
        if self.clip_value is not None:
            check_positive("clip_value", self.clip_value)
        if self.microbatch is not None and self.microbatch != "auto":
            check_whole("microbatch", self.microbatch, least=1, most=2**31)
        if self.microbatch is not None and "shard" in self.buffers.values():
            raise ValueError(
                'a buffer with the rule "shard" is as large as a shard, and microbatch runs a '
                "shard in pieces, each of which would begin with what the one before left: "
                "expected one of the two. Use more shards in place of microbatch"
            )
        if not isinstance(self.compile, bool):
            raise TypeError(
                f"expected compile to be True or False, got {self.compile!r}: modes and backends "
                f"of torch.compile are not chosen here, as some of them do not repeat their bits"
            )
        if self.schedule_every not in get_args(ScheduleEvery):
            raise ValueError(
                'expected schedule_every to be "step", "epoch" or "script", got '
                f"{self.schedule_every!r}"
            )
        if self.on_nonfinite not in get_args(OnNonfinite):
            raise ValueError(
                f'expected on_nonfinite to be "raise" or "skip", got {self.on_nonfinite!r}'
            )
