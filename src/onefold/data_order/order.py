"""The order in which a pass visits the samples of a data set, and where its batches end."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple, Protocol

import torch

from onefold.core.shard import Plan, cut_bounds

__all__ = ["BatchOrder", "Counting", "Cut", "Order", "SampleOrder"]


class Cut(NamedTuple):
    """What one batch of a pass is made of, for one process."""

    shards: dict[int, list[int]]
    """The indices of the samples of each of the process's shards; empty if the reader cuts."""
    starts: dict[int, int]
    """For each shard the place of its first sample in the pass; empty if indices are unique."""
    item: int
    """The item of the data set that is the whole batch; -1 if the batch is made of samples."""


class Order(Protocol):
    """The order of one pass; its places are counted in samples, or in whole batches."""

    @property
    def length(self) -> int:
        """Return how many places the pass has; `WHOLE` if nobody knows."""

    @property
    def digest(self) -> bytes:
        """Return what differs for different orders; empty if it follows from the seed alone."""

    def stop(self, start: int) -> int:
        """Return where the batch ends that begins at ``start``."""

    def cut(self, start: int, stop: int, plan: Plan, own: Sequence[int]) -> Cut:
        """Cut one batch for the devices ``own``."""


class Indices(Protocol):
    """The numbers of a pass's samples, (samples,) int64; a tensor, or what makes parts of one."""

    def __len__(self) -> int: ...

    def __getitem__(self, places: slice, /) -> torch.Tensor: ...


@dataclass(frozen=True, slots=True)
class Counting:
    """Numbers one after the other, however many, which take no memory."""

    length: int
    first: int = 0

    def __len__(self) -> int:
        return self.length

    def __getitem__(self, places: slice, /) -> torch.Tensor:  # (n,) int64
        start, stop, _ = places.indices(self.length)
        return torch.arange(self.first + start, self.first + stop)


@dataclass(frozen=True, slots=True)
class SampleOrder:
    """The samples of a pass, one after the other."""

    indices: Indices
    batch_size: int
    """Number of samples in a batch; of no meaning if there are ``ends``."""
    ends: Sequence[int] = ()
    """Where each batch ends, for batches of any sizes."""
    digest: bytes = b""
    repeats: bool = False
    """Whether a sample may come several times in a pass."""

    @property
    def length(self) -> int:
        """Number of samples in the pass."""
        return len(self.indices)

    def stop(self, start: int) -> int:
        """Return where the batch ends that begins at ``start``."""
        if self.ends:
            return self.ends[bisect_right(self.ends, start)]
        return min(start + self.batch_size, len(self.indices))

    def cut(self, start: int, stop: int, plan: Plan, own: Sequence[int]) -> Cut:
        """Cut one batch for the devices ``own``."""
        batch = self.indices[start:stop]
        bounds = cut_bounds(len(batch), plan.shards)
        # Lists of numbers, which cost less to send to a worker than tensors, each a file
        # descriptor.
        shards = {
            shard: batch[bounds[shard][0] : bounds[shard][1]].tolist()
            for device in own
            for shard in plan.read_by(device)
            if bounds[shard][0] < bounds[shard][1]
        }
        starts = {shard: start + bounds[shard][0] for shard in shards} if self.repeats else {}
        return Cut(shards, starts, -1)


@dataclass(frozen=True, slots=True)
class BatchOrder:
    """The items of a pass, each of which is a whole batch that the reader cuts."""

    indices: Indices
    digest: bytes = b""

    @property
    def length(self) -> int:
        """Number of batches in the pass."""
        return len(self.indices)

    def stop(self, start: int) -> int:
        """Return the next place."""
        return start + 1

    def cut(self, start: int, stop: int, plan: Plan, own: Sequence[int]) -> Cut:
        """Name the item; which shards there are is only known once it has been read."""
        return Cut({}, {}, int(self.indices[start:stop]))
