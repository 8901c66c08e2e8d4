"""The settings that a user chose for a run, validated."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass, field, fields
from typing import Any, Literal, get_args

import torch

from onefold.core.numbers import check_choice, check_positive, check_seconds, check_whole
from onefold.errors import CheckpointError

__all__ = [
    "ALLOWED_AS",
    "AS_GIVEN",
    "COSTS",
    "PRECISIONS",
    "PROMISES",
    "BufferRule",
    "LossScale",
    "Microbatch",
    "OnNonfinite",
    "Precision",
    "PrecisionName",
    "SchedulerEvery",
    "Settings",
    "added_up_in",
    "check_same",
]

BufferRule = Literal["mean", "max", "sum", "first", "per_shard"]
"""How the values of a buffer are combined over the shards."""

OnNonfinite = Literal["raise", "skip"]
"""Response to a step whose loss or gradient is not finite."""

Microbatch = int | Literal["auto"]
"""Maximum number of samples that run at once; ``"auto"`` finds it in the first steps."""

SchedulerEvery = Literal["step", "epoch", "script"]
"""When the learning rate scheduler is stepped; the script steps it if ``"script"``."""


PrecisionName = Literal["fp32", "bf16", "fp16", "bf16-params", "fp16-params"]


PRECISIONS: tuple[PrecisionName, ...] = get_args(PrecisionName)


_LOW = {"bf16": torch.bfloat16, "fp16": torch.float16}


@dataclass(frozen=True, slots=True)
class Precision:
    """Dtypes of computation, parameters and sums.

    Gradients are summed in float32 at least, whatever dtype computed them: see `added_up_in`.
    """

    name: PrecisionName | None
    """Name that the user gave; None leaves all dtypes as they are in the model."""

    def __post_init__(self) -> None:
        if self.name is not None:
            check_choice("precision", self.name, PrecisionName)

    @property
    def compute(self) -> torch.dtype | None:
        """Dtype of autocast; None without autocast."""
        return _LOW.get((self.name or "").removesuffix("-params"))

    @property
    def parameters(self) -> torch.dtype | None:
        """Dtype of trained parameters in the model; None keeps their own."""
        return self.compute if (self.name or "").endswith("-params") else None

    @property
    def is_scaled(self) -> bool:
        """Whether the loss is scaled before backward, because float16 gradients would underflow."""
        return self.compute is torch.float16


AS_GIVEN = Precision(None)
"""All dtypes as they are in the model."""


def added_up_in(dtype: torch.dtype) -> torch.dtype:
    """Return the dtype for summing a parameter's gradients, and for averaging its values.

    A sum of two bfloat16 numbers keeps 8 bits, and the fold of a batch adds many of them. float32
    keeps all their bits, and its rounding errors are 2**16 times smaller. An average moves by a
    small fraction of a difference, which low precision would round to 0: with a decay of 0.999, an
    average in bfloat16 would never change.

    >>> added_up_in(torch.bfloat16), added_up_in(torch.float64), added_up_in(torch.int8)
    (torch.float32, torch.float64, torch.int8)
    """
    return torch.float32 if dtype.is_floating_point and dtype.itemsize < 4 else dtype


_FIRST = 2.0**16


_LEAST = 1.0


_MOST = 2.0**32
"""Gradients are summed in float32, whose range leaves room for this scale."""


_GOOD_STEPS = 2000
"""Number of steps without overflow after which the scale is doubled."""


@dataclass(frozen=True, slots=True)
class LossScale:
    """The loss scale, a power of two, and the number of steps since its last change.

    >>> LossScale().after(overflow=True)
    LossScale(value=32768.0, good_steps=0)
    """

    value: float = _FIRST
    good_steps: int = 0

    def after(self, *, overflow: bool) -> LossScale:
        """Return the scale of the next step, after a step with or without an overflow."""
        if overflow:
            return LossScale(max(self.value / 2, _LEAST))
        if self.good_steps + 1 < _GOOD_STEPS:
            return LossScale(self.value, self.good_steps + 1)
        return LossScale(min(self.value * 2, _MOST))

    @property
    def can_shrink(self) -> bool:
        """Whether a smaller scale may avoid the overflow."""
        return self.value > _LEAST


_SAME_BITS = "the parameters are no longer bit-identical to those of an uninterrupted run"
_OTHER_STEPS = "the remaining steps differ from those of an uninterrupted run"
_NOT_SAVED = {"saved": False}
_OF_A_PROCESS = {"compared": False, "saved": False}


@dataclass(frozen=True, slots=True, kw_only=True)
class Settings:
    """The settings that a user chose for a run.

    By default, a setting must be the same on all devices, and is saved in checkpoints: a resumed
    run must have the same value, or allow the change. The metadata of a field can change this:

    - ``compared`` and ``saved``: False if devices, or a resumed run, may have other values;
    - ``allow``: the name under which ``--allow-changed`` allows a change, if not its own;
    - ``costs``: the consequence of a change for the run.
    """

    shards: int = field(
        metadata={"costs": f"{_SAME_BITS}, and per-shard buffers start from scratch"}
    )
    """Number of shards per batch."""
    seed: int = field(
        metadata={
            "costs": "from here on, dropout and augmentation draw other random numbers, and the "
            "rest of this epoch has another order, so some samples repeat and others are missed"
        }
    )
    """Seed of all randomness."""
    clip_norm: float | None
    """Maximum norm of the whole gradient; None for no limit."""
    clip_value: float | None = field(default=None, metadata={"allow": "clip_norm"})
    """Maximum magnitude of a gradient element; None for no limit."""
    precision: Precision = field(default=AS_GIVEN, metadata={"costs": _SAME_BITS})
    """Dtypes of computation, parameters and sums."""
    on_nonfinite: OnNonfinite = field(default="raise", metadata=_NOT_SAVED)
    """Response to a step whose loss or gradient is not finite."""
    microbatch: Microbatch | None = field(default=None, metadata={"costs": _SAME_BITS})
    """Maximum number of samples of a shard that run at once; None for all of them."""
    compile: bool = field(default=False, metadata={"costs": _SAME_BITS})
    """Whether the model and the loss of a shard are compiled together."""
    graphs: bool = field(default=False, metadata=_OF_A_PROCESS)
    """Whether accelerators capture the kernels of a shard and replay them."""
    deterministic: bool = field(metadata=_NOT_SAVED)
    """Whether kernels that do not repeat their bits are rejected."""
    timeout_s: float = field(metadata=_OF_A_PROCESS)
    """Maximum wait for another device, in seconds."""
    threads: int | None = field(metadata=_OF_A_PROCESS)
    """Threads per CPU device; None gives each shard an even share of the cores. Devices compare the
    thread counts of PyTorch instead."""
    buffers: Mapping[str, BufferRule] = field(default_factory=dict, metadata=_NOT_SAVED)
    """Buffer rules by name or pattern, where they differ from the rule of the dtype."""
    # Saved with the scheduler, if the run has one.
    scheduler_every: SchedulerEvery = field(default="step", metadata=_NOT_SAVED)
    """When the learning rate scheduler is stepped."""

    def __post_init__(self) -> None:
        check_seconds("timeout_s", self.timeout_s)
        check_whole("shards", self.shards, least=1, most=2**31)
        # The bounds of the signed 64-bit integers from which seeds are derived.
        check_whole("seed", self.seed, least=-(2**63), most=2**63 - 1)
        if self.threads is not None:
            check_whole("threads", self.threads, least=1, most=2**31)
        if self.clip_norm is not None:
            check_positive("clip_norm", self.clip_norm)
        if self.clip_value is not None:
            check_positive("clip_value", self.clip_value)
        if self.microbatch is not None and self.microbatch != "auto":
            check_whole("microbatch", self.microbatch, least=1, most=2**31)
        if self.microbatch is not None and "per_shard" in self.buffers.values():
            raise ValueError(
                'microbatch cannot be combined with a buffer whose rule is "per_shard", because '
                "each microbatch would start from the state that the previous one left. Use more "
                "shards instead"
            )
        if not isinstance(self.compile, bool):
            raise TypeError(
                f"compile must be True or False, but got {self.compile!r}. Modes and backends of "
                f"torch.compile cannot be chosen here, because some of them do not repeat their "
                f"bits"
            )
        if not isinstance(self.graphs, bool):
            raise TypeError(f"graphs must be True or False, but got {self.graphs!r}")
        check_choice("scheduler_every", self.scheduler_every, SchedulerEvery)
        check_choice("on_nonfinite", self.on_nonfinite, OnNonfinite)

    def compared(self) -> dict[str, Any]:
        """Return the settings that must be the same on all devices, as plain values by name."""
        return self._where("compared")

    def saved(self) -> dict[str, Any]:
        """Return the settings that a checkpoint stores, as plain values by name."""
        return self._where("saved")

    def _where(self, flag: str) -> dict[str, Any]:
        names = [each.name for each in fields(self) if each.metadata.get(flag, True)]
        return {name: _plain(getattr(self, name)) for name in names}


def _plain(value: Any) -> Any:
    if isinstance(value, Precision):
        return value.name
    return dict(value) if isinstance(value, Mapping) else value


_SAVED = [each for each in fields(Settings) if each.metadata.get("saved", True)]
ALLOWED_AS: dict[str, str] = {each.name: each.metadata.get("allow", each.name) for each in _SAVED}
"""Name of each saved setting in ``--allow-changed``."""
COSTS: dict[str, str] = {
    each.name: each.metadata.get("costs", _OTHER_STEPS)
    for each in _SAVED
    if ALLOWED_AS[each.name] == each.name
}
"""Consequence of changing each setting, by its name in ``--allow-changed``."""

PROMISES = {
    **COSTS,
    "batch_size": "the remaining steps differ from those of an uninterrupted run; each sample is "
    "still used once per epoch",
    "dataset": "the rest of this epoch has another order, so some samples repeat and others are "
    "missed",
    "optimizer": "the optimizer starts from scratch, without its accumulated state",
    "scheduler": "the scheduler starts from scratch",
    "average": "the average restarts from the values in the checkpoint, or ends",
}
"""Consequence of each change that is allowed on resuming."""


def check_same(
    what: str, saved: object, now: object, allow_changed: Collection[str], name: str
) -> None:
    """Check that a value equals the saved one, unless the change is allowed.

    Args:
        what: key in `PROMISES` that allows the change.
        saved: value in the checkpoint.
        now: value in this run.
        allow_changed: keys of `PROMISES` whose values may differ.
        name: name of the value in the message.

    Raises:
        CheckpointError: the values differ; the message explains how to load anyway, and the
            consequence.
    """
    if saved == now or what in allow_changed:
        return
    raise CheckpointError(
        f"the checkpoint was saved with {name} {saved}, but this run has {now}. If the change is "
        f'intended, pass trainer.load(..., allow_changed=["{what}"]) or onefold run '
        f"--allow-changed {what}. Then {PROMISES[what]}"
    )
