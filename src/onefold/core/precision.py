"""The precisions in which a run can compute, and what each of them means for its numbers."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, get_args

import torch

__all__ = ["AS_GIVEN", "PRECISIONS", "Precision", "PrecisionName", "added_up_in"]

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
