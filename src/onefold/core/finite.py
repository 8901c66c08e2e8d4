"""Finds values that are not finite before they are written in place of good ones.

Note: what is looked at
-----------------------
Parameters must be finite, all of them: one that is not spoils every step that follows. Buffers may
hold infinities on purpose (a mask), and a NaN that was there when the run began (a value that is
not known yet); a NaN that came later is refused, as a mean that has one never loses it. The
optimizer's state is not looked at: a NaN in it is in the parameters after the same step, and
infinities are legitimate there.

A sum is not finite where one of its terms is not, so one pass of additions finds that all is well.
Where the sum overflows, though its terms are finite, the terms themselves are looked at.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping

import torch

__all__ = ["all_finite", "first_not_finite", "names_with_nan"]


def all_finite(values: torch.Tensor) -> bool:
    """Whether no element is NaN or infinite; whole numbers never are."""
    if not (values.dtype.is_floating_point or values.dtype.is_complex) or not values.numel():
        return True
    return bool(torch.isfinite(_sum(values))) or bool(torch.isfinite(_wide(values)).all())


def first_not_finite(
    sections: Iterable[torch.Tensor], tensors: Mapping[str, torch.Tensor]
) -> str | None:
    """The name of the first tensor that is not finite.

    Args:
        sections: flat tensors in which all values lie.
        tensors: the same values by name; looked at only where a section is not finite.
    """
    if all(map(all_finite, sections)):
        return None
    return next((name for name, value in tensors.items() if not all_finite(value)), None)


def names_with_nan(tensors: Mapping[str, torch.Tensor]) -> set[str]:
    """Of the tensors that have a NaN; infinities do not count."""
    return {
        name
        for name, value in tensors.items()
        if not all_finite(value) and bool(torch.isnan(_wide(value)).any())
    }


def _sum(values: torch.Tensor) -> torch.Tensor:
    """() of a type with room for far more than the largest term of a small type."""
    if values.dtype in (torch.float16, torch.bfloat16):
        return values.detach().sum(dtype=torch.float32)
    return _wide(values).sum()


def _wide(values: torch.Tensor) -> torch.Tensor:
    """The same values in a type that can be added up."""
    values = values.detach()
    return values.float() if values.dtype.is_floating_point and values.itemsize < 4 else values
