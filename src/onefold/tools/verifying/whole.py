"""Makes payloads of all samples of a batch, to be computed as one shard, or of any of them."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
import torch
from torch.utils.data import default_collate

from onefold.core.batch import map_parts
from onefold.core.randomness import GeneratorStates, in_common, kept_generators, seed_generators
from onefold.core.structure import parts_of, tensors_of, with_parts
from onefold.data_order.reader import Collate

__all__ = ["KeepingCollate", "WholeBatch", "cast_floats", "second_dimension", "whole_of"]


WholeBatch = Callable[[Sequence[int]], object]
"""Makes what the loss is given for any samples of a batch."""


class _Kept(NamedTuple):
    """A shard's payload, and what it was made of."""

    payload: object
    """What the loss is given."""
    samples: list[Any]
    """The samples as the data set returned them."""
    draws: bool
    """Whether random numbers were drawn in making the payload."""
    common: tuple[str, tuple[int, ...]] | None
    """What it had in common with the other shards, for numbers that all of them draw alike."""


class KeepingCollate:
    """A collate function that makes the user's payloads, in the precision of the comparison.

    Args:
        collate: that of the script; PyTorch's if None.
        dtype: the dtype for floating-point numbers; None to leave them alone.
        keeps: whether to keep the samples as well, for the whole batch.
    """

    def __init__(self, collate: Collate | None, dtype: torch.dtype | None, *, keeps: bool) -> None:
        self._collate = collate
        self._dtype = dtype
        self._keeps = keeps

    def __call__(self, samples: list[Any]) -> object:
        # Runs where the loader reads, which may be another process: what was drawn is found out
        # here, and travels with the payload.
        before = GeneratorStates()
        payload = self.make(samples)
        if not self._keeps:
            return payload
        return _Kept(payload, samples, bool(before.drawn_from()), in_common())

    def make(self, samples: list[Any]) -> object:
        """Make a payload of some samples."""
        return cast_floats((self._collate or default_collate)(samples), self._dtype)


def whole_of(
    shards: Mapping[int, object], collates: Mapping[int, KeepingCollate], loader: int, dim: int = 0
) -> tuple[WholeBatch, dict[int, object]]:
    """Return the whole batch of a loader's shards, and the shards' plain payloads.

    Where making a payload draws random numbers, the shards' payloads are joined, so that all see
    the same draws; where they cannot be joined, the whole batch has draws of its own.

    Args:
        shards: for each shard what `KeepingCollate` made.
        collates: the collate function of each loader, by the loader's number.
        loader: number of the loader that made the batch.
        dim: the dimension of tensors in which the samples lie.
    """
    kept = {shard: each for shard, each in shards.items() if isinstance(each, _Kept)}
    if not kept:
        # Shards of a batch that was whole before, and so can be joined.
        return whole_tensors(_join(list(shards.values()), 0)), dict(shards)
    payloads = {shard: each.payload for shard, each in kept.items()}
    if any(each.draws for each in kept.values()):
        joined = _join(list(payloads.values()), dim)
        if joined is not None:
            return whole_tensors(joined, dim), payloads
    samples = [sample for shard in sorted(kept) for sample in kept[shard].samples]
    common = next(iter(kept.values())).common

    def whole(rows: Sequence[int]) -> object:
        with kept_generators():
            if common is not None:
                seed_generators(0, common=common)
            return collates[loader].make([samples[row] for row in rows])

    return whole, payloads


def whole_tensors(batch: object, dim: int = 0) -> WholeBatch:
    """Return the whole batch of tensors that a script made itself, with samples in ``dim``."""

    def whole(rows: Sequence[int]) -> object:
        index = torch.tensor(list(rows), dtype=torch.int64)
        return _map(batch, lambda leaf: leaf.index_select(dim, index.to(leaf.device)))

    return whole


def cast_floats(payload: object, dtype: torch.dtype | None) -> Any:
    """Return the same structure with every floating-point tensor in a dtype."""
    if dtype is None:
        return payload
    return _map(payload, lambda leaf: leaf.to(dtype) if leaf.is_floating_point() else leaf)


def second_dimension(payload: object) -> int | None:
    """Return the size of all tensors' second dimension; None where they do not agree in it."""
    sizes = {leaf.shape[1] if leaf.dim() > 1 else None for leaf in tensors_of(payload)}
    return sizes.pop() if len(sizes) == 1 else None


def _join(payloads: Sequence[Any], dim: int) -> object | None:
    """Join payloads along the samples; None where they do not fit together."""
    first = payloads[0]
    if isinstance(first, torch.Tensor):
        if first.dim() <= dim:
            return None
        shapes = {(*p.shape[:dim], *p.shape[dim + 1 :]) for p in payloads}
        return torch.cat(list(payloads), dim) if len(shapes) == 1 else None
    every = [parts_of(payload) or [] for payload in payloads]
    # Lists of one part a sample are of various lengths.
    if not every[0] or len({tuple(path for path, _ in parts) for parts in every}) > 1:
        return None
    joined = [_join([part for _, part in parts], dim) for parts in zip(*every, strict=True)]
    return None if any(part is None for part in joined) else with_parts(first, joined)


def _map(payload: Any, change: Callable[[torch.Tensor], torch.Tensor]) -> Any:
    """Change every tensor, and every array of numbers, which becomes one."""

    def changed(leaf: Any) -> Any:
        if isinstance(leaf, np.ndarray) and leaf.dtype.kind in "biuf":
            # A copy: PyTorch takes neither a foreign byte order nor negative strides.
            native = np.array(leaf, leaf.dtype.newbyteorder("="), order="C")
            return change(torch.from_numpy(native))
        return change(leaf) if isinstance(leaf, torch.Tensor) else leaf

    return map_parts(payload, changed)
