"""The precisions in which a run can compute, and what each of them means for its numbers. Pure.

`LossScale` is the factor by which losses of float16 are multiplied before backward. Gradients below
6e-8 are 0 in float16. Multiplied by a power of two, a loss has gradients that survive, and dividing
by it again rounds nothing (Micikevicius et al. 2018, Mixed Precision Training).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, get_args

import torch

__all__ = ["AS_GIVEN", "PRECISIONS", "LossScale", "Precision", "PrecisionName", "added_up_in"]


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
        if self.name is not None and self.name not in PRECISIONS:
            expected = ", ".join(f'"{name}"' for name in PRECISIONS)
            raise ValueError(f"expected precision to be one of {expected} or None, got {self.name}")

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
    """The dtype in which gradients of a parameter are added up.

    A sum of two bfloat16 numbers keeps 8 bits, and the fold of a batch adds many: float32 holds
    them all, and what it rounds is 2**16 times smaller.

    >>> added_up_in(torch.bfloat16), added_up_in(torch.float64)
    (torch.float32, torch.float64)
    """
    return torch.float32 if dtype in _LOW.values() else dtype


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
