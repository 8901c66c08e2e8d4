"""Where a model may be cut into stages, and how a pipeline computes these. Pure.

`Stages` records which of the model's parameters lie in which stage. `cut_pipeline` decides which
stages each device of a pipeline has, and `moves` in which order it computes.

The first device of a pipeline computes the beginning of the model, the next one goes on with what
it was given, and the last one has the loss; backward goes the same way back. A device begins with
as many forward passes as there are devices behind it, and from then on takes one back for each one
forth, so that it never has more shards under way than there are devices from it on. This order is
known as 1F1B (Narayanan et al., 2019, "PipeDream: generalized pipeline parallelism for DNN
training").
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
"""The stage of what lies in no other one, or in several."""


@dataclass(frozen=True, slots=True)
class Stages:
    """The stage of each trained parameter; stage 0 is the root."""

    names: tuple[str, ...]
    """What each stage is called in messages, the root included."""
    stage_of: tuple[int, ...]
    """For each trained parameter, in the order of their layout, the number of its stage."""
    places: tuple[int, ...] = ()
    """For each stage, the place of the device that computes it, in a pipeline of several devices;
    empty where every device computes all stages."""

    @property
    def pipeline(self) -> int:
        """How many devices compute the model together."""
        return max(self.places, default=0) + 1

    @property
    def entries(self) -> tuple[tuple[int, ...], ...]:
        """For each stage, the numbers of its parameters."""
        return tuple(
            tuple(number for number, stage in enumerate(self.stage_of) if stage == wanted)
            for wanted in range(len(self.names))
        )

    def __len__(self) -> int:
        return len(self.names)


class StageLayout:
    """Where segments lie in memory that holds one stage at a time.

    Args:
        layout: of what is held there.
        segments: of the whole model.
        stages: the stage of each entry.
    """

    def __init__(self, layout: Layout, segments: Sequence[Segment], stages: Stages) -> None:
        self.layout = layout
        self.stages = stages
        self.segments: list[list[int]] = [[] for _ in stages.names]
        """For each stage, the numbers of its segments."""
        self.places: list[tuple[int, int, torch.dtype]] = []
        """For each segment where it begins and how long it is, in bytes, and its dtype."""
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
        """Bytes of each stage."""

    @property
    def nbytes(self) -> int:
        """Bytes of the largest stage."""
        return max(self.stage_bytes)

    def whole(self, entry: int, room: torch.Tensor) -> torch.Tensor:
        """View of an entry, in its shape, in memory that holds its stage."""
        found, dtype = self.layout.entries[entry], self.layout.dtype_of(entry)
        # The segments of an entry follow each other without gaps.
        start = self._starts[entry]
        stretch = room[start : start + found.numel * dtype.itemsize].view(dtype)
        return stretch.as_strided(found.shape, found.stride)

    def in_room(self, number: int, room: torch.Tensor) -> torch.Tensor:
        """(numel,) view of a segment in memory that holds its stage, (stage_bytes,) uint8."""
        start, nbytes, dtype = self.places[number]
        return room[start : start + nbytes].view(dtype)


class Move(Enum):
    """What a device does with a shard, or with a microbatch of one."""

    FORTH = "forth"
    BACK = "back"


def moves(place: int, devices: int, count: int) -> Iterator[tuple[Move, int]]:
    """The order in which one device of a pipeline computes.

    Args:
        place: of the device in its pipeline, from 0.
        devices: how many the pipeline has.
        count: how many shards, or microbatches of shards, go through it.

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
    """The order in which microbatches of shards go through a pipeline.

    A microbatch begins with what the one before it in its shard has left (random numbers,
    statistics of batch norm), so it begins after that one has been there and back. Meanwhile other
    shards are under way: as many as there are devices. Where shards are missing for that, a device
    does nothing in their place.

    Args:
        microbatches: for each shard that has samples, the number of its microbatches.
        devices: how many the pipeline has.

    Returns:
        The place of a shard in ``microbatches``, and the number of its microbatch; None for a gap.

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
            # Also a group that is smaller needs the time of a whole one, until its last microbatch.
            order += [None] * (devices - len(group) if microbatch < most - 1 else 0)
    return order


def waiting(devices: int, count: int) -> float:
    """How much longer a step of an even pipeline takes than the work of one of its devices.

    >>> waiting(4, 8)
    0.375
    """
    return (devices - 1) / count


_MERGED_SHARE, _MERGED_BYTES = 1 / 8, 16 << 20
"""Stages are merged up to this share of all of them, or this size."""


def merge(sizes: Sequence[int]) -> list[int]:
    """Make one stage of small neighbors, from the end of the model on, where backward begins.

    What is left at the beginning stays small, as nothing is computed while it is sent.

    Args:
        sizes: of the stages in bytes, in the order of the model.

    Returns:
        The new number of each.

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
    """Divide stages among the devices of a pipeline: for each a row of about the same size.

    Args:
        sizes: of the stages in bytes, in the order of the model.
        devices: how many there are.

    Returns:
        The place in the pipeline of each stage, such that the largest share is as small as can be.

    Raises:
        ValueError: there are fewer stages than devices.

    >>> cut_pipeline((5, 1, 1, 1, 4), 3)
    (0, 1, 1, 1, 2)
    """
    if not 1 <= devices <= len(sizes):
        raise ValueError(
            f"expected a stage or more for each device of a pipeline, got {len(sizes)} stages and "
            f"{devices} devices: use fewer devices, or name more stages with Trainer(stages=[...])"
        )
    # The least size that no share need be larger than.
    limits = range(max(sizes), sum(sizes) + 1)
    place = bisect_left(limits, len(sizes), key=lambda limit: _ends(sizes, devices, limit)[-1])
    starts = [0, *_ends(sizes, devices, limits[place])]
    return tuple(
        place for place, (start, stop) in enumerate(pairwise(starts)) for _ in range(start, stop)
    )


def _ends(sizes: Sequence[int], devices: int, limit: int) -> list[int]:
    """Where each share ends, none larger than the limit, and none empty; the last one too early
    if the limit is too low."""
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
