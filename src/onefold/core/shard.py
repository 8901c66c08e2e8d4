"""How a batch is cut into shards, which device runs which, and how a shard is cut. Pure.

A shard is run in microbatches where a whole one is too large for its device's memory:
`microbatch_bounds` cuts it.

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
    """First and past-the-last sample of every shard, cut as ``torch.tensor_split`` cuts.

    The first ``samples % shards`` shards hold one sample more than the others; with fewer samples
    than shards the last ones are empty.

    >>> cut_bounds(7, 3)
    ((0, 3), (3, 5), (5, 7))
    """
    size, longer = divmod(samples, shards)
    starts = [shard * size + min(shard, longer) for shard in range(shards + 1)]
    return tuple(pairwise(starts))


@lru_cache(maxsize=1024)
def runs_of(numbers: Sequence[int]) -> tuple[slice, ...]:
    """Where numbers in ascending order lie in a table: one slice for each row of neighbors.

    >>> runs_of((0, 1, 2, 5))
    (slice(0, 3, None), slice(5, 6, None))
    """
    starts = [n for place, n in enumerate(numbers) if not place or numbers[place - 1] != n - 1]
    stops = [n + 1 for n in numbers if n + 1 not in numbers]
    return tuple(map(slice, starts, stops))


@dataclass(frozen=True, slots=True)
class Shares:
    """Which device runs which shards: ``counts[d]`` for device ``d``, in device order.

    A device's shards are neighbors, so that it can add up most of them by itself. In rounds they
    are not: all devices take the next shards one after the other, and what is added up of a round
    is one row of neighbors.

    >>> Shares.even(shards=7, devices=3).counts
    (3, 2, 2)
    >>> Shares((1, 0, 3)).shards_of(2)
    range(1, 4)
    >>> Shares((3, 1), in_rounds=True).shards_of(0)
    (0, 2, 3)
    """

    counts: tuple[int, ...]
    """Number of shards of each device; a device with none merely updates its partition."""
    in_rounds: bool = False
    """Whether the devices take the shards in turn."""
    pipeline: int = 1
    """How many devices compute a shard together, the one that has it and those after it."""
    shards: int = field(init=False, repr=False, compare=False)
    """How many shards every batch is cut into (V)."""

    def __post_init__(self) -> None:
        # Once, as it is asked for many times in a step.
        object.__setattr__(self, "shards", sum(self.counts))
        if not self.counts or any(count < 0 for count in self.counts) or not sum(self.counts):
            raise ValueError(
                f"shares give every device zero or more shards, at least one in all; "
                f"got {self.counts}"
            )

    @classmethod
    def even(cls, *, shards: int, devices: int) -> Shares:
        """Share the shards out evenly: the devices' shares differ by one shard at most.

        Raises:
            ValueError: there are more devices than shards.
        """
        return cls(_even_shares(shards, devices, "device"))

    @classmethod
    def whole(cls, *, devices: int) -> Shares:
        """Have the first device compute whole batches, each as one shard.

        >>> Shares.whole(devices=3).counts
        (1, 0, 0)
        """
        return cls((1, *[0] * (devices - 1)))

    @classmethod
    def in_pipelines(cls, *, shards: int, devices: int, pipeline: int) -> Shares:
        """Have the devices of each pipeline compute shards together: the first one of it has them.

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
        """Make shares from counts that a user wrote down, checked against the run.

        Raises:
            ValueError: the counts are for a different number of devices, or add up to a different
                number of shards.
        """
        shares = cls(tuple(int(count) for count in counts))
        if len(shares.counts) != devices or shares.shards != shards:
            raise ValueError(
                f"the shares {shares.counts} have {len(shares.counts)} devices and {shares.shards} "
                f"shards; this run has {devices} devices and {shards} shards"
            )
        return shares

    @property
    def devices(self) -> int:
        """The number of devices that take part."""
        return len(self.counts)

    def shards_of(self, device: int) -> Sequence[int]:
        """The shards that ``device`` runs, in ascending order."""
        if self.in_rounds:
            return tuple(row[device] for row in self.rounds() if device in row)
        start = sum(self.counts[:device])
        return range(start, start + self.counts[device])

    def read_by(self, device: int) -> Sequence[int]:
        """The shards of which ``device`` needs the samples: its own, or those of its pipeline."""
        return self.shards_of(device // self.pipeline * self.pipeline)

    def column_of(self, device: int) -> range:
        """The devices that compute the same as ``device``, one in each pipeline.

        >>> list(Shares.in_pipelines(shards=4, devices=6, pipeline=2).column_of(3))
        [1, 3, 5]
        """
        return range(device % self.pipeline, self.devices, self.pipeline)

    def in_a_row(self) -> Shares:
        """Make the shares in which each device's shards are neighbors, and it has them for itself.

        The counts are the same, except of pipelines: what goes through those is shared out evenly.
        """
        if self.pipeline == 1:
            return Shares(self.counts)
        return Shares(tuple(stop - start for start, stop in cut_bounds(self.shards, self.devices)))

    def rounds(self) -> tuple[Mapping[int, int], ...]:
        """What runs at the same time: for each round the shard of every device that has one.

        >>> Shares((3, 1), in_rounds=True).rounds()
        ({0: 0, 1: 1}, {0: 2}, {0: 3})
        """
        return _rounds(self)


def _even_shares(shards: int, number: int, what: str) -> tuple[int, ...]:
    if not 1 <= number <= shards:
        s = "s" * (shards > 1)
        raise ValueError(
            f"{number} {what}s cannot share {shards} shard{s}: a shard is never divided. Use at "
            f"most {shards} {what}{s}, or give Trainer more shards"
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
"""What a payload may hold beside the samples, alike for all of them."""
_NO_OBJECTS = (torch.Tensor, np.ndarray, tuple, list, *_PLAIN)


def microbatch_bounds(samples: int, size: int | None) -> tuple[tuple[int, int], ...]:
    """Cut a shard into the fewest microbatches of at most ``size`` samples, as equal as can be.

    >>> microbatch_bounds(7, 3)
    ((0, 3), (3, 5), (5, 7))
    >>> microbatch_bounds(7, None)
    ((0, 7),)
    """
    # Equal ones, as a rest of a single sample would be none that batch norm could normalize.
    return cut_bounds(samples, 1 if size is None else max(1, -(-samples // size)))


def rows_of(payload: Any, microbatch: tuple[int, int], samples: int, *, dim: int = 0) -> Any:
    """Take a microbatch's samples out of a shard's payload; tensors are views of the payload's.

    Args:
        payload: tensors, arrays or rows of text (samples, ...), in any tuples, lists, mappings and
            dataclasses, which keep their type; or lists of one part a sample, see the note at the
            head of this file. Single numbers and texts, which belong to all samples, go along.
        microbatch: the first sample, and the one after the last.
        samples: how many samples the shard has.
        dim: the dimension of tensors in which the samples lie.

    Raises:
        ValueError: a tensor has another size in that dimension than the samples.
        TypeError: the payload holds something that cannot be cut.
    """
    return _Cut(microbatch, samples, dim, _lists_samples(payload, samples)).rows(payload, "batch")


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

    microbatch: tuple[int, int]
    samples: int
    dim: int
    listed: bool
    """Whether the payload holds lists of samples that are no tensors."""

    def rows(self, payload: Any, path: str) -> Any:
        if isinstance(payload, torch.Tensor | np.ndarray):
            return self._rows_of_tensor(payload, path)
        if isinstance(payload, tuple | list):
            if self.are_samples(payload):
                return with_parts(payload, payload[slice(*self.microbatch)])
            if payload and all(isinstance(row, _NUMBERS) for row in payload):
                raise TypeError(
                    f"{path}: expected a tensor of one row a sample, got {len(payload)} numbers in "
                    f"a {type(payload).__name__}, of which microbatch cannot tell whether they "
                    f"belong to the {self.samples} samples or to all of them. Have the data set's "
                    f"collate make a tensor of them"
                )
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
        return payload[(*[slice(None)] * self.dim, slice(*self.microbatch))]

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
        # A single number has no dimension, and belongs to all.
        return tensor.shape[self.dim : self.dim + 1] == (self.samples,) or not tensor.ndim


def _lists_samples(payload: Any, samples: int) -> bool:
    """Whether there is a list of one object a sample anywhere in a payload; texts do not count."""
    if isinstance(payload, tuple | list) and _are_listed(payload, samples):
        return not isinstance(payload[0], str | bytes)
    return any(_lists_samples(part, samples) for _, part in parts_of(payload) or ())


def _are_listed(rows: Sequence[Any], samples: int) -> bool:
    """Whether a list has one part a sample that is no tensor."""
    if len(rows) != samples or hasattr(rows, "_fields"):
        return False
    return all(isinstance(row, str | bytes) for row in rows) or all(
        isinstance(row, Mapping) or has_fields(row) or not isinstance(row, _NO_OBJECTS)
        for row in rows
    )
