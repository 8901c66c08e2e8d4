"""Stages of a model, and their order of computation in a pipeline. Pure.

`Stages` maps each parameter to its stage. `cut_pipeline` assigns stages to the devices of a
pipeline, and `moves` gives the order of a device's forward and backward passes.

The first device of a pipeline computes the beginning of the model. Each following device continues
from the activations that it receives, and the last one computes the loss; backward runs in the
opposite direction. A device first runs as many forward passes as there are devices after it, and
then alternates forward and backward. So it never has more shards in flight than there are devices
from itself to the end. This schedule is known as 1F1B (Narayanan et al., 2019, "PipeDream:
generalized pipeline parallelism for DNN training").
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from enum import Enum
from itertools import pairwise

import torch

from onefold.core.flat import Layout, Segment, aligned

__all__ = [
    "ROOT",
    "Move",
    "StageLayout",
    "Stages",
    "cut_pipeline",
    "in_groups",
    "merge",
    "moves",
    "waiting",
]


ROOT = 0
"""Number of the root stage, for parameters that belong to no other stage, or to several."""


@dataclass(frozen=True, slots=True)
class Stages:
    """The stage of each trained parameter; stage 0 is the root."""

    names: tuple[str, ...]
    """Name of each stage in messages, including the root."""
    stage_of: tuple[int, ...]
    """Stage number of each trained parameter, in layout order."""
    places: tuple[int, ...] = ()
    """Position in the pipeline of the device that computes each stage; empty if there is no
    pipeline, and every device computes all stages."""

    @property
    def pipeline(self) -> int:
        """Number of devices that compute the model together."""
        return max(self.places, default=0) + 1

    @property
    def entries(self) -> tuple[tuple[int, ...], ...]:
        """Parameter numbers of each stage."""
        return tuple(
            tuple(number for number, stage in enumerate(self.stage_of) if stage == wanted)
            for wanted in range(len(self.names))
        )

    def __len__(self) -> int:
        return len(self.names)


class StageLayout:
    """Offsets of segments in memory that holds one stage at a time.

    Args:
        layout: layout of the values in that memory.
        segments: segments of the whole model.
        stages: stage of each entry.
    """

    def __init__(self, layout: Layout, segments: Sequence[Segment], stages: Stages) -> None:
        self.layout = layout
        self.stages = stages
        self.segments: list[list[int]] = [[] for _ in stages.names]
        """Segment numbers of each stage."""
        self.places: list[tuple[int, int, torch.dtype]] = []
        """Offset and size of each segment, in bytes, and its dtype."""
        self._starts: dict[int, int] = {}
        filled = [0] * len(stages)
        for number, segment in enumerate(segments):
            stage = stages.stage_of[segment.entry]
            dtype = layout.dtype_of(segment.entry)
            nbytes = segment.numel * dtype.itemsize
            self.segments[stage].append(number)
            self._starts.setdefault(segment.entry, filled[stage])
            self.places.append((filled[stage], nbytes, dtype))
            filled[stage] += aligned(nbytes)
        self.stage_bytes = tuple(filled)
        """Size of each stage, in bytes."""

    @property
    def nbytes(self) -> int:
        """Size of the largest stage, in bytes."""
        return max(self.stage_bytes)

    def whole(self, entry: int, room: torch.Tensor) -> torch.Tensor:
        """Return a view of an entry, in its shape, in memory that holds its stage."""
        found, dtype = self.layout.entries[entry], self.layout.dtype_of(entry)
        # The segments of an entry are contiguous, so that one view covers them.
        start = self._starts[entry]
        stretch = room[start : start + found.numel * dtype.itemsize].view(dtype)
        return stretch.as_strided(found.shape, found.stride)

    def in_room(self, number: int, room: torch.Tensor) -> torch.Tensor:
        """Return a (numel,) view of a segment in ``room``: (stage_bytes,) uint8, its stage."""
        start, nbytes, dtype = self.places[number]
        return room[start : start + nbytes].view(dtype)


class Move(Enum):
    """Direction in which a device computes a shard or a microbatch: forward or backward."""

    FORTH = "forth"
    BACK = "back"


def moves(place: int, devices: int, count: int) -> Iterator[tuple[Move, int]]:
    """Yield the passes of one device of a pipeline, in order.

    Args:
        place: position of the device in its pipeline, from 0.
        devices: number of devices in the pipeline.
        count: number of shards, or microbatches of shards, to compute.

    >>> [f"{move.value} {number}" for move, number in moves(0, 2, 3)]
    ['forth 0', 'forth 1', 'back 0', 'forth 2', 'back 1', 'back 2']
    """
    ahead = min(devices - 1 - place, count)
    for number in range(ahead):
        yield Move.FORTH, number
    for number in range(count):
        if number + ahead < count:
            yield Move.FORTH, number + ahead
        yield Move.BACK, number


def in_groups(microbatches: Sequence[int], devices: int) -> list[tuple[int, int] | None]:
    """Return the order of the shards' microbatches in a pipeline.

    A microbatch starts from the state that the previous one of its shard left (random numbers,
    batch norm statistics), so it starts after that one's backward pass. Meanwhile the pipeline
    computes other shards: as many as there are devices. If there are fewer shards, devices idle in
    the gaps.

    Args:
        microbatches: number of microbatches of each shard that has samples.
        devices: number of devices in the pipeline.

    Returns:
        Index of a shard in ``microbatches``, and its microbatch number; None for a gap.

    >>> in_groups([2, 1, 1], 2)
    [(0, 0), (1, 0), (0, 1), None, (2, 0)]
    """
    order: list[tuple[int, int] | None] = []
    for start in range(0, len(microbatches), devices):
        group = range(start, min(start + devices, len(microbatches)))
        most = max(microbatches[shard] for shard in group)
        for microbatch in range(most):
            order += [
                (shard, microbatch) if microbatch < microbatches[shard] else None for shard in group
            ]
            # A smaller group takes as long as a full one, except for its last microbatch.
            order += [None] * (devices - len(group) if microbatch < most - 1 else 0)
    return order


def waiting(devices: int, count: int) -> float:
    """Return the idle time of a device in an even pipeline, relative to its work in a step.

    >>> waiting(4, 8)
    0.375
    """
    return (devices - 1) / count


_MERGED_SHARE, _MERGED_BYTES = 1 / 8, 16 << 20
"""Stages are merged up to this fraction of the model, or up to this size if that is smaller."""


def merge(sizes: Sequence[int]) -> list[int]:
    """Merge small neighboring stages, from the end of the model, where backward begins.

    The stages at the beginning stay small, because no computation overlaps sending them.

    Args:
        sizes: stage sizes in bytes, in model order.

    Returns:
        New number of each stage.

    >>> merge((1, 1, 9, 20, 40, 1))
    [0, 0, 1, 2, 3, 3]
    """
    least = min(sum(sizes) * _MERGED_SHARE, _MERGED_BYTES)
    found, number, filled = [], 0, 0
    for size in reversed(sizes):
        found.append(number)
        filled += size
        if filled >= least:
            number, filled = number - 1, 0
    return [number - found[-1] for number in reversed(found)]


def cut_pipeline(sizes: Sequence[int], devices: int) -> tuple[int, ...]:
    """Assign each device of a pipeline a run of consecutive stages, balanced by size.

    Args:
        sizes: stage sizes in bytes, in model order.
        devices: number of devices in the pipeline.

    Returns:
        Pipeline position of each stage, such that the largest share is as small as possible.

    Raises:
        ValueError: there are fewer stages than devices.

    >>> cut_pipeline((5, 1, 1, 1, 4), 3)
    (0, 1, 1, 1, 2)
    """
    if not 1 <= devices <= len(sizes):
        raise ValueError(
            f"a pipeline needs at least one stage per device, but got {len(sizes)} stages and "
            f"{devices} devices. Use fewer devices, or define more stages with "
            f"Trainer(stages=[...])"
        )
    # Find the smallest limit with which the shares cover all stages.
    limits = range(max(sizes), sum(sizes) + 1)
    place = bisect_left(limits, len(sizes), key=lambda limit: _ends(sizes, devices, limit)[-1])
    starts = [0, *_ends(sizes, devices, limits[place])]
    return tuple(
        place for place, (start, stop) in enumerate(pairwise(starts)) for _ in range(start, stop)
    )


def _ends(sizes: Sequence[int], devices: int, limit: int) -> list[int]:
    """Return the end of each share, with shares that are non-empty and within the limit; the last
    end is too early if the limit is too low."""
    ends: list[int] = []
    stop = 0
    for place in range(devices):
        filled, start = 0, stop
        left = devices - place - 1
        while stop < len(sizes) - left and (stop == start or filled + sizes[stop] <= limit):
            filled += sizes[stop]
            stop += 1
        ends.append(stop)
    return ends
