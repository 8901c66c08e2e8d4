"""How far two ways of computing the same may differ, by the precision that they compute in."""

from __future__ import annotations

from collections.abc import Collection

import torch

__all__ = ["EXACT", "tolerance_of"]

EXACT = 1e-9
"""For what is computed in float64."""
_TOLERANCES = {torch.float64: EXACT, torch.float32: 1e-4, torch.float16: 0.05, torch.bfloat16: 0.2}


def tolerance_of(model: torch.nn.Module, rounded: Collection[torch.dtype] = ()) -> float:
    """Return how far, relatively, two ways of computing the same may differ.

    Args:
        model: of which they are computed.
        rounded: other types in which a part of it is.

    >>> model = torch.nn.Linear(3, 4).double()
    >>> tolerance_of(model), tolerance_of(model, [torch.float32])
    (1e-09, 0.0001)
    """
    dtypes = [*(p.dtype for p in model.parameters()), *rounded]
    return max((_TOLERANCES.get(dtype, 0.2) for dtype in dtypes), default=EXACT)
