"""Finds values that are not finite before they are written in place of good ones.

Note: what is checked
---------------------
All parameters must be finite: a single one that is not spoils every step that follows. Buffers may
hold infinities on purpose (a mask), and a NaN that was there when the run began (a value that is
not known yet); a NaN that appears later is refused, because a running mean never gets rid of one.
The optimizer's state is not checked: a NaN in it reaches the parameters in the same step, and
infinities are legitimate there.

A sum is not finite if one of its terms is not, so a single pass of additions, without a mask the
size of the model, proves that all is well. Only where the sum itself is not finite, which may be an
overflow of finite terms, are the terms looked at one by one.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping

import torch

__all__ = ["all_finite", "first_not_finite", "names_with_nan"]


def all_finite(values: torch.Tensor) -> bool:
    """Whether no element is NaN or infinite; whole numbers are always finite."""
    if not (values.dtype.is_floating_point or values.dtype.is_complex) or not values.numel():
        return True
    # The second look is only taken if the sum fails: see the note on what is checked.
    return bool(torch.isfinite(_sum(values))) or bool(torch.isfinite(_wide(values)).all())


def first_not_finite(
    sections: Iterable[torch.Tensor], tensors: Mapping[str, torch.Tensor]
) -> str | None:
    """The name of the first tensor that is not finite.

    Args:
        sections: flat tensors in which all values lie.
        tensors: the same values by name; searched only if a section is not finite.
    """
    # A few large sections are checked in far fewer kernels than thousands of small parameters.
    if all(map(all_finite, sections)):
        return None
    return next((name for name, value in tensors.items() if not all_finite(value)), None)


def names_with_nan(tensors: Mapping[str, torch.Tensor]) -> set[str]:
    """The names of the tensors that hold a NaN; infinities do not count."""
    # Nearly always the cheap sum settles it, and no mask of a whole tensor is allocated.
    return {
        name
        for name, value in tensors.items()
        if not all_finite(value) and bool(torch.isnan(_wide(value)).any())
    }


def _sum(values: torch.Tensor) -> torch.Tensor:
    """Add up all values, () in a dtype that small types do not overflow."""
    # `sum(dtype=)` widens while it adds; `.float()` would first copy the tensor at twice its size.
    if values.dtype in (torch.float16, torch.bfloat16):
        return values.detach().sum(dtype=torch.float32)
    return _wide(values).sum()


def _wide(values: torch.Tensor) -> torch.Tensor:
    """The same values in a dtype that has all the kernels used here, which float8 has not."""
    values = values.detach()
    return values.float() if values.dtype.is_floating_point and values.itemsize < 4 else values
