"""The settings that a user chose for a run, checked."""

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
"""How the values that shards leave in a buffer become one."""

OnNonfinite = Literal["raise", "skip"]
"""What becomes of a step with a loss or a gradient that is not finite."""

Microbatch = int | Literal["auto"]
"""The most samples of a shard that run at once; found in the first steps if it is ``"auto"``."""

SchedulerEvery = Literal["step", "epoch", "script"]
"""After what the learning rate scheduler is stepped, or that the script does it."""


PrecisionName = Literal["fp32", "bf16", "fp16", "bf16-params", "fp16-params"]


PRECISIONS: tuple[PrecisionName, ...] = get_args(PrecisionName)


_LOW = {"bf16": torch.bfloat16, "fp16": torch.float16}


@dataclass(frozen=True, slots=True)
class Precision:
    """What is computed, kept and added up in which dtype.

    Gradients are added up in float32 at least, whatever they were computed in: see `added_up_in`.
    """

    name: PrecisionName | None
    """As the user named it; None leaves everything as the model has it."""

    def __post_init__(self) -> None:
        if self.name is not None:
            check_choice("precision", self.name, PrecisionName)

    @property
    def compute(self) -> torch.dtype | None:
        """The dtype that autocast computes in; None without autocast."""
        return _LOW.get((self.name or "").removesuffix("-params"))

    @property
    def parameters(self) -> torch.dtype | None:
        """The dtype in which models hold trained parameters; None for that which they have."""
        return self.compute if (self.name or "").endswith("-params") else None

    @property
    def is_scaled(self) -> bool:
        """Whether the loss is scaled before backward, as gradients of float16 vanish otherwise."""
        return self.compute is torch.float16


AS_GIVEN = Precision(None)
"""Everything stays as the model has it."""


def added_up_in(dtype: torch.dtype) -> torch.dtype:
    """The dtype in which gradients of a parameter are added up, and values are averaged.

    A sum of two bfloat16 numbers keeps 8 bits, and the fold of a batch adds many: float32 holds
    them all, and what it rounds is 2**16 times smaller. An average moves by a small part of a
    difference, which low precision would round away: with a decay of 0.999 one in bfloat16 would
    stand still.

    >>> added_up_in(torch.bfloat16), added_up_in(torch.float64), added_up_in(torch.int8)
    (torch.float32, torch.float64, torch.int8)
    """
    return torch.float32 if dtype.is_floating_point and dtype.itemsize < 4 else dtype


_FIRST = 2.0**16


_LEAST = 1.0


_MOST = 2.0**32
"""Gradients are added up in float32, which leaves room for it."""


_GOOD_STEPS = 2000
"""After so many without an overflow, twice the scale is tried."""


@dataclass(frozen=True, slots=True)
class LossScale:
    """A power of two, and how long it has been good.

    >>> LossScale().after(overflow=True)
    LossScale(value=32768.0, good_steps=0)
    """

    value: float = _FIRST
    good_steps: int = 0

    def after(self, *, overflow: bool) -> LossScale:
        """The scale of the step that follows one with or without an overflow."""
        if overflow:
            return LossScale(max(self.value / 2, _LEAST))
        if self.good_steps + 1 < _GOOD_STEPS:
            return LossScale(self.value, self.good_steps + 1)
        return LossScale(min(self.value * 2, _MOST))

    @property
    def can_shrink(self) -> bool:
        """Whether an overflow may be the scale's doing."""
        return self.value > _LEAST


_SAME_BITS = "the parameters are no longer, bit for bit, those of the run that never stopped"
_OTHER_STEPS = "the rest of the run takes other steps than the run that never stopped"
_NOT_SAVED = {"saved": False}
_OF_A_PROCESS = {"compared": False, "saved": False}


@dataclass(frozen=True, slots=True, kw_only=True)
class Settings:
    """The settings that a user chose for a run.

    Unless its field says otherwise, a setting must be the same on all devices, and is saved in
    checkpoints: a resumed run must have it too, or allow the change. The metadata of a field are:

    - ``compared`` and ``saved``: False for what devices, or a resumed run, may have differently;
    - ``allow``: under which name ``--allow-changed`` allows a change, if not its own;
    - ``costs``: what a run gives up that changes it.
    """

    shards: int = field(
        metadata={"costs": f"{_SAME_BITS}, and buffers that each shard has for itself begin anew"}
    )
    """How many shards every batch is cut into."""
    seed: int = field(
        metadata={
            "costs": "dropout and augmentation come from other random numbers from here on, and "
            "the rest of this epoch from another order: some samples come twice in it and some "
            "not at all"
        }
    )
    """The seed of all randomness."""
    clip_norm: float | None
    """The largest norm that the whole gradient may have; None for no limit."""
    clip_value: float | None = field(default=None, metadata={"allow": "clip_norm"})
    """The largest magnitude that an element of the gradient may have; None for no limit."""
    precision: Precision = field(default=AS_GIVEN, metadata={"costs": _SAME_BITS})
    """What is computed in which dtype."""
    on_nonfinite: OnNonfinite = field(default="raise", metadata=_NOT_SAVED)
    """What becomes of a step with a loss or a gradient that is not finite."""
    microbatch: Microbatch | None = field(default=None, metadata={"costs": _SAME_BITS})
    """The most samples of a shard that run at once; None for all of them."""
    compile: bool = field(default=False, metadata={"costs": _SAME_BITS})
    """Whether the model and the loss of a shard are compiled together."""
    deterministic: bool = field(metadata=_NOT_SAVED)
    """Whether kernels that do not repeat their bits are refused."""
    timeout_s: float = field(metadata=_OF_A_PROCESS)
    """The longest wait for another device."""
    threads: int | None = field(metadata=_OF_A_PROCESS)
    """Threads of each CPU device; None gives each shard an even share of the cores. Devices compare
    how many PyTorch has."""
    buffers: Mapping[str, BufferRule] = field(default_factory=dict, metadata=_NOT_SAVED)
    """The rule for buffers, by name or pattern, where it differs from that of their dtype."""
    # Saved with the scheduler, if there is one.
    scheduler_every: SchedulerEvery = field(default="step", metadata=_NOT_SAVED)
    """When the learning rate scheduler is stepped."""

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
        if self.microbatch is not None and "per_shard" in self.buffers.values():
            raise ValueError(
                'a buffer with the rule "per_shard" is as large as a shard, and microbatch runs a '
                "shard in microbatches, each of which would begin with what the one before left: "
                "expected one of the two. Use more shards in place of microbatch"
            )
        if not isinstance(self.compile, bool):
            raise TypeError(
                f"expected compile to be True or False, got {self.compile!r}: modes and backends "
                f"of torch.compile are not chosen here, as some of them do not repeat their bits"
            )
        check_choice("scheduler_every", self.scheduler_every, SchedulerEvery)
        check_choice("on_nonfinite", self.on_nonfinite, OnNonfinite)

    def compared(self) -> dict[str, Any]:
        """Return what must be the same on all devices, as plain values by name."""
        return self._where("compared")

    def saved(self) -> dict[str, Any]:
        """Return what a checkpoint holds, as plain values by name."""
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
"""The name for ``--allow-changed`` of each setting that is saved."""
COSTS: dict[str, str] = {
    each.name: each.metadata.get("costs", _OTHER_STEPS)
    for each in _SAVED
    if ALLOWED_AS[each.name] == each.name
}
"""What a run gives up that changes a setting, by the name for ``--allow-changed``."""

PROMISES = {
    **COSTS,
    "batch_size": "the rest of the run takes other steps than the run that never stopped; each "
    "sample still comes once an epoch",
    "dataset": "the rest of this epoch comes from another order: some samples come twice in it and "
    "some not at all",
    "optimizer": "the optimizer begins anew, without what it has gathered",
    "scheduler": "the scheduler begins anew",
    "average": "the average begins anew, with the values of the checkpoint, or ends",
}
"""For each thing that may be changed on resuming, what the run gives up by it."""


def check_same(
    what: str, saved: object, now: object, allow_changed: Collection[str], name: str
) -> None:
    """Refuse a value that differs from the saved one, unless it was changed on purpose.

    Args:
        what: the key in `PROMISES` under which the value may be changed.
        saved: the value in the checkpoint.
        now: the value in this run.
        allow_changed: the keys of `PROMISES` that may differ.
        name: what the value is called in the message.

    Raises:
        CheckpointError: the values differ; the message says how to load anyway, and at what price.
    """
    if saved == now or what in allow_changed:
        return
    raise CheckpointError(
        f"the checkpoint was saved with {name} {saved}, this run has {now}: expected the same. If "
        f'it was changed on purpose, trainer.load(..., allow_changed=["{what}"]) or onefold run '
        f"--allow-changed {what} goes on; then {PROMISES[what]}"
    )
