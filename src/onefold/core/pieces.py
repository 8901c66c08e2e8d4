"""Pieces of a shard, where a whole one is too large for its device's memory. Pure."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch

from onefold.core.shard import cut_bounds

__all__ = ["Search", "pieces_of", "rows_of"]

_NUMBERS = (int, float, complex)
_PLAIN = (str, bytes, *_NUMBERS, type(None))
"""What a payload may hold beside the samples, alike for all of them."""


def pieces_of(samples: int, size: int | None) -> tuple[tuple[int, int], ...]:
    """Cut a shard into the fewest pieces of at most ``size`` samples, as equal as can be.

    >>> pieces_of(7, 3)
    ((0, 3), (3, 5), (5, 7))
    >>> pieces_of(7, None)
    ((0, 7),)
    """
    # Equal ones, as a rest of a single sample would be none that batch norm could normalise.
    return cut_bounds(samples, 1 if size is None else -(-samples // size))


def rows_of(payload: Any, piece: tuple[int, int], samples: int, path: str = "batch") -> Any:
    """Take a piece's samples out of a shard's payload; tensors are views of the payload's.

    Args:
        payload: tensors, arrays or rows of text (samples, ...), in any tuples, lists and dicts.
            Single numbers and texts, which belong to all samples, go along as they are.
        piece: the first sample, and the one after the last.
        samples: how many samples the shard has.
        path: name of the payload, for errors.

    Raises:
        ValueError: a tensor has another first dimension than the samples.
        TypeError: the payload holds something that cannot be cut.
    """
    start, stop = piece
    if isinstance(payload, torch.Tensor | np.ndarray):
        if payload.ndim and len(payload) != samples:
            raise ValueError(
                f"{path}: expected a first dimension of {samples}, the shard's samples, along "
                f"which microbatch can cut it; got shape {tuple(payload.shape)}. Use more shards "
                f"instead, or have the data set's collate give one row a sample"
            )
        return payload[start:stop] if payload.ndim else payload
    if isinstance(payload, tuple | list):
        if len(payload) == samples and all(isinstance(row, str | bytes) for row in payload):
            return payload[start:stop]
        if payload and all(isinstance(row, _NUMBERS) for row in payload):
            raise TypeError(
                f"{path}: expected a tensor of one row a sample, got {len(payload)} numbers in a "
                f"{type(payload).__name__}, of which microbatch cannot tell whether they belong to "
                f"the {samples} samples or to all of them. Have the data set's collate make a "
                f"tensor of them"
            )
        rows = [rows_of(v, piece, samples, f"{path}[{n}]") for n, v in enumerate(payload)]
        if isinstance(payload, list):
            return rows
        return type(payload)(*rows) if hasattr(payload, "_fields") else tuple(rows)
    if isinstance(payload, Mapping):
        return {k: rows_of(v, piece, samples, f"{path}[{k!r}]") for k, v in payload.items()}
    if isinstance(payload, _PLAIN):
        return payload
    raise TypeError(
        f"{path}: expected tensors, or tuples, lists and dicts of them, which microbatch can cut, "
        f"got {type(payload).__name__}. Use more shards instead"
    )


@dataclass(frozen=True, slots=True)
class Search:
    """A search for the largest pieces that fit; each trial makes the next search.

    Sizes are halved until one fits. Then those are tried that would make fewer pieces.

    >>> search = Search(samples=8)
    >>> while not search.is_over:
    ...     search = search.tried(fits=search.size <= 3)
    >>> search.found
    3
    """

    samples: int
    """How many samples the largest shard has."""
    found: int = 0
    """The largest size that is known to fit; 0 if none is."""
    too_large: int | None = None
    """The smallest size that is known not to fit."""

    @property
    def is_over(self) -> bool:
        """Whether nothing is left to try; without a size in ``found``, nothing fits."""
        return not self._open

    @property
    def size(self) -> int:
        """The size to try next."""
        sizes = self._open
        return sizes[len(sizes) // 2]

    def tried(self, *, fits: bool) -> Search:
        """Note what became of ``size``."""
        return replace(self, found=self.size) if fits else replace(self, too_large=self.size)

    @property
    def _open(self) -> list[int]:
        """The sizes that might be tried, from the smallest."""
        if self.too_large is None:
            return [] if self.found else [self.samples]
        if not self.found:
            return [(self.too_large + 1) // 2] if self.too_large > 1 else []
        # Two sizes that make the same number of pieces cost the same time.
        fewest, most = (-(-self.samples // size) for size in (self.too_large, self.found))
        sizes = {-(-self.samples // pieces) for pieces in range(fewest, most)}
        return sorted(size for size in sizes if self.found < size < self.too_large)
