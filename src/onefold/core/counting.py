"""How many samples a payload holds, where `collate` may have left some out. Pure.

Note: what is seen, and what is not
-----------------------------------
A collate function that drops broken samples returns k rows for the n samples that it was given, and
a scalar loss is then the mean over k. A payload does not say which of its dimensions is that of the
samples. So it is k only where every field has k rows and none has n, and where nothing speaks for
another reading: a list of tensors of one kind may be one of samples, and where each tensor has a
dimension of n the samples may lie there. The answer follows from one shard's payload alone: what
else a device has read must not show in its bits.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any, NamedTuple

import numpy as np
import torch

from onefold.core.structure import has_fields, parts_of, tensors_of

__all__ = ["Count", "count_of"]

_Tensor = torch.Tensor | np.ndarray


class Count(NamedTuple):
    """How many samples a payload holds."""

    samples: int
    sure: bool = True
    """Whether nothing speaks for fewer."""


def count_of(payload: object, samples: int, dim: int = 0) -> Count:
    """Find out how many samples a payload holds; as many as were read unless fewer are seen.

    Args:
        payload: what ``collate`` returned for one shard.
        samples: n, how many samples it was given.
        dim: the dimension of tensors in which the samples lie.

    >>> count_of([torch.zeros(3, 5), torch.zeros(3)], 4)
    Count(samples=3, sure=True)
    >>> count_of([torch.zeros(3, 5), torch.zeros(2)], 4)
    Count(samples=4, sure=False)
    """
    fields = []
    for lengths in _lengths(payload, samples, dim):
        if samples in lengths:
            return Count(samples)  # nearly always, and at once
        fields += [lengths] if lengths else []
    listed, of_tensors = _listed(payload)
    # Two or three tensors of one kind may still be fields.
    if listed == samples and (samples > 3 or not of_tensors):
        return Count(samples)
    least = min([listed or samples, *map(min, fields)])
    if least >= samples:
        return Count(samples)
    common = set.intersection(*fields) if fields else set()
    numbered = (each for each in tensors_of(payload, _Tensor) if each.ndim)
    elsewhere = dim == 0 and all(samples in _shape(each) for each in numbered)
    if len(common) != 1 or listed or elsewhere:
        return Count(samples, sure=False)
    return Count(common.pop())


def _lengths(payload: Any, samples: int, dim: int) -> Iterator[set[int]]:
    """For each field, how many samples it may hold; nothing where it does not say."""
    if isinstance(payload, _Tensor):
        yield _length(payload, dim)
        return
    for _, part in parts_of(payload) or ():
        if isinstance(part, Mapping) or has_fields(part):
            yield from _lengths(part, samples, dim)
        elif isinstance(part, tuple | list):
            # Texts may be many: a list as long as there are samples is not gone through.
            inner = tensors_of(part, _Tensor) if len(part) != samples else ()
            lengths = [_length(tensor, dim) for tensor in inner if tensor.ndim]
            yield {len(part)}.union(set.intersection(*lengths) if lengths else ())
        elif isinstance(part, _Tensor):
            yield _length(part, dim)


def _length(tensor: Any, dim: int) -> set[int]:
    shape = _shape(tensor)
    return {shape[dim]} if len(shape) > dim else set()


def _shape(tensor: Any) -> tuple[int, ...]:
    # One of sequences of several lengths has only the first number.
    nested = isinstance(tensor, torch.Tensor) and tensor.is_nested
    return (tensor.size(0),) if nested else tuple(tensor.shape)


def _listed(payload: object) -> tuple[int, bool]:
    """How many parts of one kind there are, as samples are, and whether they are tensors."""
    if not isinstance(payload, tuple | list) or hasattr(payload, "_fields"):
        return 0, False
    of_tensors = all(isinstance(part, _Tensor) for part in payload)
    kinds = {(p.dtype, p.ndim) if isinstance(p, _Tensor) else type(p) for p in payload}
    # A tensor alone is a field.
    return len(payload) if len(kinds) == 1 and len(payload) > of_tensors else 0, of_tensors
