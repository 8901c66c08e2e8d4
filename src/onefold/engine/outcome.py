"""What an engine returns of a step."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from onefold.core.values import StepValues
from onefold.engine.verdict import Verdict

__all__ = ["Outcome"]


@dataclass(frozen=True, slots=True)
class Outcome:
    """The result of a step."""

    totals: torch.Tensor
    """(V,) float64, where the lead computes: each shard's part of the loss."""
    weight: float
    """What the sum of totals is divided by."""
    verdict: Verdict
    """Whether the parameters were updated and the run goes on; the same on all devices."""
    norm: torch.Tensor | None
    """The norm of the whole gradient before clipping, (); None if the step has none."""
    values: StepValues | None = None
    """What the loss returned beside itself; None if that was nothing."""
