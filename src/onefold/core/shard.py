"""Cuts a batch into shards and a shard into microbatches, and shares shards among devices. Pure.

If a shard is too large for a device's memory, it runs in microbatches: `microbatch_bounds` cuts it.

Note: lists of samples
----------------------
A list as long as the shard may hold one item per sample, as collate functions for detection return
it (a list of images of various sizes, a list of dicts of boxes). Or it may hold tensors with a row
per sample, and their number equals the number of samples by chance. It holds samples if its items
are strings, dicts, dataclasses or other objects. A list of tensors holds samples if none of them
has the length of the shard, or if the payload also holds samples of those other types.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from itertools import pairwise
from typing import Any

import numpy as np
import torch

from onefold.core.structure import has_fields, parts_of, with_parts

__all__ = ["Shares", "cut_bounds", "join_rows", "microbatch_bounds", "rows_of", "runs_of"]


@lru_cache(maxsize=64)
def cut_bounds(samples: int, shards: int) -> tuple[tuple[int, int], ...]:
    """Return the bounds (first, last + 1) of every shard, as ``torch.tensor_split`` cuts.

    The first ``samples % shards`` shards hold one sample more than the others. With fewer samples
    than shards, the last shards are empty.

    >>> cut_bounds(7, 3)
    ((0, 3), (3, 5), (5, 7))
    """
    size, longer = divmod(samples, shards)
    starts = [shard * size + min(shard, longer) for shard in range(shards + 1)]
    return tuple(pairwise(starts))


@lru_cache(maxsize=1024)
def runs_of(numbers: Sequence[int]) -> tuple[slice, ...]:
    """Return slices that select numbers in ascending order: one for each run of neighbors.

    >>> runs_of((0, 1, 2, 5))
    (slice(0, 3, None), slice(5, 6, None))
    """
    starts = [n for place, n in enumerate(numbers) if not place or numbers[place - 1] != n - 1]
    stops = [n + 1 for n in numbers if n + 1 not in numbers]
    return tuple(map(slice, starts, stops))


@dataclass(frozen=True, slots=True)
class Shares:
    """The shards that each device runs: ``counts[d]`` for device ``d``, in device order.

    A device's shards are contiguous, so that it can sum most of them itself. With ``in_rounds``
    they are not: in each round the devices run the next shards, one each, so that the shards summed
    after a round are contiguous.

    >>> Shares.even(shards=7, devices=3).counts
    (3, 2, 2)
    >>> Shares((1, 0, 3)).shards_of(2)
    range(1, 4)
    >>> Shares((3, 1), in_rounds=True).shards_of(0)
    (0, 2, 3)
    """

    counts: tuple[int, ...]
    """Number of shards of each device; a device with 0 shards only updates its partition."""
    in_rounds: bool = False
    """Whether the devices take the shards in turn."""
    pipeline: int = 1
    """Number of devices that compute a shard together: the one that owns it and those after it."""
    shards: int = field(init=False, repr=False, compare=False)
    """Number of shards per batch (V)."""

    def __post_init__(self) -> None:
        # Computed once, because a step reads it many times.
        object.__setattr__(self, "shards", sum(self.counts))
        if not self.counts or any(count < 0 for count in self.counts) or not sum(self.counts):
            raise ValueError(
                f"shares require zero or more shards per device, and at least one in total, but "
                f"got {self.counts}"
            )

    @classmethod
    def even(cls, *, shards: int, devices: int) -> Shares:
        """Share the shards evenly: counts differ by at most one shard.

        Raises:
            ValueError: there are more devices than shards.
        """
        return cls(_even_shares(shards, devices, "device"))

    @classmethod
    def whole(cls, *, devices: int) -> Shares:
        """Let the first device compute whole batches, each as one shard.

        >>> Shares.whole(devices=3).counts
        (1, 0, 0)
        """
        return cls((1, *[0] * (devices - 1)))

    @classmethod
    def in_pipelines(cls, *, shards: int, devices: int, pipeline: int) -> Shares:
        """Let the devices of each pipeline compute shards together; the first one owns them.

        Raises:
            ValueError: there are more pipelines than shards.

        >>> Shares.in_pipelines(shards=4, devices=2, pipeline=2).read_by(1)
        (0, 1, 2, 3)
        >>> Shares.in_pipelines(shards=5, devices=4, pipeline=2).counts
        (3, 0, 2, 0)
        """
        counts = [0] * devices
        counts[::pipeline] = _even_shares(shards, devices // pipeline, "pipeline")
        return cls(tuple(counts), in_rounds=True, pipeline=pipeline)

    @classmethod
    def given(cls, counts: Sequence[int], *, shards: int, devices: int) -> Shares:
        """Make shares from counts that the user wrote, and check them against the run.

        Raises:
                ValueError: the counts are for another number of devices, or their sum is not
                    ``shards``.
        """
        shares = cls(tuple(int(count) for count in counts))
        if len(shares.counts) != devices or shares.shards != shards:
            raise ValueError(
                f"this run has {devices} devices and {shards} shards, but the shares "
                f"{shares.counts} are for {len(shares.counts)} devices and {shares.shards} shards"
            )
        return shares

    @property
    def devices(self) -> int:
        """Number of devices."""
        return len(self.counts)

    def shards_of(self, device: int) -> Sequence[int]:
        """Return the shards that ``device`` runs, in ascending order."""
        if self.in_rounds:
            return tuple(row[device] for row in self.rounds() if device in row)
        start = sum(self.counts[:device])
        return range(start, start + self.counts[device])

    def read_by(self, device: int) -> Sequence[int]:
        """Return the shards whose samples ``device`` needs: its own, or those of its pipeline."""
        return self.shards_of(device // self.pipeline * self.pipeline)

    def column_of(self, device: int) -> range:
        """Return the devices that compute the same stages as ``device``, one in each pipeline.

        >>> list(Shares.in_pipelines(shards=4, devices=6, pipeline=2).column_of(3))
        [1, 3, 5]
        """
        return range(device % self.pipeline, self.devices, self.pipeline)

    def in_a_row(self) -> Shares:
        """Return shares in which each device's shards are contiguous, without a pipeline.

        The counts stay the same. If there is a pipeline, all devices share the shards evenly.
        """
        if self.pipeline == 1:
            return Shares(self.counts)
        return Shares(tuple(stop - start for start, stop in cut_bounds(self.shards, self.devices)))

    def rounds(self) -> tuple[Mapping[int, int], ...]:
        """Return the shards that run at the same time: for each round, a shard by device.

        >>> Shares((3, 1), in_rounds=True).rounds()
        ({0: 0, 1: 1}, {0: 2}, {0: 3})
        """
        return _rounds(self)


def _even_shares(shards: int, number: int, what: str) -> tuple[int, ...]:
    if not 1 <= number <= shards:
        s = "s" * (shards > 1)
        raise ValueError(
            f"{number} {what}s cannot share {shards} shard{s}: a shard is never divided. Use at "
            f"most {shards} {what}{s}, or pass more shards to Trainer"
        )
    return tuple(stop - start for start, stop in cut_bounds(shards, number))


@lru_cache(maxsize=64)
def _rounds(shares: Shares) -> tuple[Mapping[int, int], ...]:
    rows: list[dict[int, int]] = []
    shard = 0
    for turn in range(max(shares.counts)):
        devices = [device for device, count in enumerate(shares.counts) if count > turn]
        if shares.in_rounds:
            rows.append({device: shard + place for place, device in enumerate(devices)})
        else:
            rows.append({device: sum(shares.counts[:device]) + turn for device in devices})
        shard += len(devices)
    return tuple(rows)


_NUMBERS = (int, float, complex)
_PLAIN = (str, bytes, *_NUMBERS, type(None))
"""Types that a payload may hold in addition to samples; microbatches get these values whole."""
_NO_OBJECTS = (torch.Tensor, np.ndarray, tuple, list, *_PLAIN)


def microbatch_bounds(samples: int, size: int | None) -> tuple[tuple[int, int], ...]:
    """Cut a shard into the fewest microbatches of at most ``size`` samples, as equal as possible.

    >>> microbatch_bounds(7, 3)
    ((0, 3), (3, 5), (5, 7))
    >>> microbatch_bounds(7, None)
    ((0, 7),)
    """
    # Equal sizes, because a remainder of one sample would be too small for batch norm.
    return cut_bounds(samples, 1 if size is None else max(1, -(-samples // size)))


def rows_of(payload: Any, microbatch: tuple[int, int], samples: int, *, dim: int = 0) -> Any:
    """Take a microbatch's samples from a shard's payload; tensors are views of the payload's.

    Args:
        payload: tensors, arrays or lists of strings (samples, ...), in any tuples, lists, mappings
            and dataclasses, which keep their type; or lists with one item per sample, see the note
            at the top of this file. Single numbers and strings belong to all samples and are kept.
        microbatch: the first sample, and the one after the last.
        samples: number of samples in the shard.
        dim: sample dimension of tensors.

    Raises:
        ValueError: the size of a tensor in that dimension is not the number of samples.
        TypeError: the payload holds something that cannot be cut.
    """
    return _Cut(microbatch, samples, dim, _lists_samples(payload, samples)).rows(payload, "batch")


def join_rows(payloads: Sequence[Any], sizes: Sequence[int], *, dim: int = 0) -> Any:
    """Concatenate the payloads of shards, in the structure of the first one.

    Args:
        payloads: as for `rows_of`, one for each shard.
        sizes: number of samples in each shard.
        dim: sample dimension of tensors.

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
        f"{path}: expected tensors that can be concatenated along their samples, lists with one "
        f"item per sample, or values that are equal in all shards, but got {came}. If collate pads "
        f"each shard to its own length, pad to a fixed length instead"
    )


@dataclass(frozen=True, slots=True)
class _Cut:
    """The parameters of cutting one payload."""

    microbatch: tuple[int, int]
    samples: int
    dim: int
    listed: bool
    """Whether the payload holds lists of samples that are not tensors."""

    def rows(self, payload: Any, path: str) -> Any:
        if isinstance(payload, torch.Tensor | np.ndarray):
            return self._rows_of_tensor(payload, path)
        if isinstance(payload, tuple | list):
            if self.are_samples(payload):
                return with_parts(payload, payload[slice(*self.microbatch)])
            if payload and all(isinstance(row, _NUMBERS) for row in payload):
                raise TypeError(
                    f"{path}: expected a tensor with one row per sample, but got {len(payload)} "
                    f"numbers in a {type(payload).__name__}. microbatch cannot tell whether these "
                    f"numbers belong to the {self.samples} samples or to all of them. Make a "
                    f"tensor of them in the data set's collate"
                )
        parts = parts_of(payload)
        if parts is not None:
            return with_parts(payload, [self.rows(part, path + name) for name, part in parts])
        if isinstance(payload, _PLAIN):
            return payload
        raise TypeError(
            f"{path}: microbatch can cut tensors, and tuples, lists, dicts and dataclasses of "
            f"tensors, but got {type(payload).__name__}. Use more shards instead"
        )

    def _rows_of_tensor(self, payload: Any, path: str) -> Any:
        if not payload.ndim:
            return payload
        if payload.ndim <= self.dim or payload.shape[self.dim] != self.samples:
            where = f"size in dimension {self.dim}" if self.dim else "first dimension"
            raise ValueError(
                f"{path}: expected a {where} of {self.samples}, the number of samples in the "
                f"shard, but got shape {tuple(payload.shape)}. microbatch cuts along that "
                f"dimension. Use more shards instead, or return one row per sample from the data "
                f"set's collate"
            )
        return payload[(*[slice(None)] * self.dim, slice(*self.microbatch))]

    def are_samples(self, rows: Sequence[Any]) -> bool:
        """Return whether a list has one item per sample, instead of items for all samples."""
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
        """Return whether a tensor may have a row per sample, or belong to all samples."""
        # A single number has no dimension, and belongs to all samples.
        return tensor.shape[self.dim : self.dim + 1] == (self.samples,) or not tensor.ndim


def _lists_samples(payload: Any, samples: int) -> bool:
    """Return whether a payload contains a list with one object per sample, not counting strings."""
    if isinstance(payload, tuple | list) and _are_listed(payload, samples):
        return not isinstance(payload[0], str | bytes)
    return any(_lists_samples(part, samples) for _, part in parts_of(payload) or ())


def _are_listed(rows: Sequence[Any], samples: int) -> bool:
    """Return whether a list has one item per sample, and its items are not tensors."""
    if len(rows) != samples or hasattr(rows, "_fields"):
        return False
    return all(isinstance(row, str | bytes) for row in rows) or all(
        isinstance(row, Mapping) or has_fields(row) or not isinstance(row, _NO_OBJECTS)
        for row in rows
    )
