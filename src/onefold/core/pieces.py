"""Pieces of a shard, where a whole one is too large for its device's memory. Pure.

Note: lists of samples
----------------------
A list as long as the shard may hold one thing a sample, as collate functions for detection make it
(a list of images of various sizes, a list of dicts of boxes), or tensors that each have a row for
every sample, which are then as many as samples by chance. It holds samples if its parts are texts,
dicts, dataclasses or other objects. Tensors are samples if none has the length of the shard, or if
the payload holds samples of those other kinds beside them.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch

from onefold.core.shard import cut_bounds
from onefold.core.structure import has_fields, parts_of, with_parts

__all__ = ["Search", "join_rows", "pieces_of", "rows_of"]

_NUMBERS = (int, float, complex)
_PLAIN = (str, bytes, *_NUMBERS, type(None))
"""What a payload may hold beside the samples, alike for all of them."""
_NO_OBJECTS = (torch.Tensor, np.ndarray, tuple, list, *_PLAIN)


def pieces_of(samples: int, size: int | None) -> tuple[tuple[int, int], ...]:
    """Cut a shard into the fewest pieces of at most ``size`` samples, as equal as can be.

    >>> pieces_of(7, 3)
    ((0, 3), (3, 5), (5, 7))
    >>> pieces_of(7, None)
    ((0, 7),)
    """
    # Equal ones, as a rest of a single sample would be none that batch norm could normalise.
    return cut_bounds(samples, 1 if size is None else max(1, -(-samples // size)))


def rows_of(
    payload: Any, piece: tuple[int, int], samples: int, path: str = "batch", *, dim: int = 0
) -> Any:
    """Take a piece's samples out of a shard's payload; tensors are views of the payload's.

    Args:
        payload: tensors, arrays or rows of text (samples, ...), in any tuples, lists, mappings and
            dataclasses, which keep their type; or lists of one part a sample, see the note at the
            head of this file. Single numbers and texts, which belong to all samples, go along.
        piece: the first sample, and the one after the last.
        samples: how many samples the shard has.
        path: name of the payload, for errors.
        dim: the dimension of tensors in which the samples lie.

    Raises:
        ValueError: a tensor has another size in that dimension than the samples.
        TypeError: the payload holds something that cannot be cut.
    """
    return _Cut(piece, samples, dim, _lists_samples(payload, samples)).rows(payload, path)


def join_rows(payloads: Sequence[Any], sizes: Sequence[int], *, dim: int = 0) -> Any:
    """Join the payloads of shards to that of all their samples, in the structure of the first.

    Args:
        payloads: as for `rows_of`, one for each shard.
        sizes: how many samples each shard has.
        dim: the dimension of tensors in which the samples lie.

    Raises:
        ValueError: payloads differ in more than their samples.
    """
    cuts = [
        _Cut((0, size), size, dim, _lists_samples(payload, size))
        for payload, size in zip(payloads, sizes, strict=True)
    ]
    return _joined(payloads, cuts, "batch")


def _joined(payloads: Sequence[Any], cuts: Sequence[_Cut], path: str) -> Any:
    first, dim = payloads[0], cuts[0].dim
    if all(isinstance(each, torch.Tensor) and each.ndim > dim for each in payloads):
        if len({(*each.shape[:dim], *each.shape[dim + 1 :]) for each in payloads}) == 1:
            return torch.cat(list(payloads), dim)
    elif all(map(_Cut.are_samples, cuts, payloads)):
        return with_parts(first, [sample for payload in payloads for sample in payload])
    elif (parts := parts_of(first)) is not None:
        names = [name for name, _ in parts]
        found = [dict(parts_of(each) or ()) for each in payloads]
        if all(list(each) == names for each in found):
            of_names = {name: [each[name] for each in found] for name in names}
            return with_parts(first, [_joined(of_names[n], cuts, path + n) for n in names])
    elif isinstance(first, _PLAIN) and all(each == first for each in payloads):
        return first
    came = [tuple(p.shape) if isinstance(p, torch.Tensor) else type(p).__name__ for p in payloads]
    raise ValueError(
        f"{path}: expected tensors of all shards that can be joined along their samples, lists of "
        f"one part a sample, or values alike in all shards, got {came}. A collate that pads each "
        f"shard to its own length can pad to a fixed one"
    )


@dataclass(frozen=True, slots=True)
class _Cut:
    """How one payload is cut."""

    piece: tuple[int, int]
    samples: int
    dim: int
    listed: bool
    """Whether the payload holds lists of samples that are no tensors."""

    def rows(self, payload: Any, path: str) -> Any:
        if isinstance(payload, torch.Tensor | np.ndarray):
            return self._rows_of_tensor(payload, path)
        if isinstance(payload, tuple | list):
            if self.are_samples(payload):
                return with_parts(payload, payload[slice(*self.piece)])
            self._refuse_numbers(payload, path)
        parts = parts_of(payload)
        if parts is not None:
            return with_parts(payload, [self.rows(part, path + name) for name, part in parts])
        if isinstance(payload, _PLAIN):
            return payload
        raise TypeError(
            f"{path}: expected tensors, or tuples, lists, dicts and dataclasses of them, which "
            f"microbatch can cut, got {type(payload).__name__}. Use more shards instead"
        )

    def _rows_of_tensor(self, payload: Any, path: str) -> Any:
        if not payload.ndim:
            return payload
        if payload.ndim <= self.dim or payload.shape[self.dim] != self.samples:
            where = f"size in dimension {self.dim}" if self.dim else "first dimension"
            raise ValueError(
                f"{path}: expected a {where} of {self.samples}, the shard's samples, along which "
                f"microbatch can cut it; got shape {tuple(payload.shape)}. Use more shards "
                f"instead, or have the data set's collate give one row a sample"
            )
        return payload[(*[slice(None)] * self.dim, slice(*self.piece))]

    def are_samples(self, rows: Sequence[Any]) -> bool:
        """Whether a list has one part a sample, and not one for all of them."""
        if not isinstance(rows, tuple | list):
            return False
        if _are_listed(rows, self.samples):
            return True
        if len(rows) != self.samples or hasattr(rows, "_fields"):
            return False
        if not all(isinstance(row, torch.Tensor | np.ndarray) for row in rows):
            return False
        return self.listed or not any(self._may_be_whole(row) for row in rows)

    def _may_be_whole(self, tensor: Any) -> bool:
        """Whether a tensor may have a row for each sample, or belong to all of them."""
        if not tensor.ndim:
            return True
        return tensor.ndim > self.dim and bool(tensor.shape[self.dim] == self.samples)

    def _refuse_numbers(self, rows: Sequence[Any], path: str) -> None:
        if rows and all(isinstance(row, _NUMBERS) for row in rows):
            raise TypeError(
                f"{path}: expected a tensor of one row a sample, got {len(rows)} numbers in a "
                f"{type(rows).__name__}, of which microbatch cannot tell whether they belong to "
                f"the {self.samples} samples or to all of them. Have the data set's collate make a "
                f"tensor of them"
            )


def _lists_samples(payload: Any, samples: int) -> bool:
    """Whether there is a list of one object a sample anywhere in a payload; texts do not count."""
    if isinstance(payload, tuple | list) and _are_listed(payload, samples):
        return not isinstance(payload[0], str | bytes)
    return any(_lists_samples(part, samples) for _, part in parts_of(payload) or ())


def _are_listed(rows: Sequence[Any], samples: int) -> bool:
    """Whether a list has one part a sample that is no tensor."""
    if len(rows) != samples or hasattr(rows, "_fields"):
        return False
    return all(isinstance(row, str | bytes) for row in rows) or all(map(_is_object, rows))


def _is_object(row: Any) -> bool:
    if isinstance(row, Mapping) or has_fields(row):
        return True
    return not isinstance(row, _NO_OBJECTS)


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
