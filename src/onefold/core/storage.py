"""Sizes of the memory that the devices of a run share, and the cuts of a layout. Pure.

A layout is cut into segments, segments are grouped into one partition per device, and partitions
are cut into chunks.

Each device may keep a part of the `Frozen` parameters, as it does of the trained ones. No result
depends on the bounds of these parts, so they may depend on the number of devices. Frozen segments
are numbered after the trained ones and follow them in the memory of a stage.

Note: why segments
------------------
An optimizer kernel may treat the tail of a tensor differently from its middle, so the bits of an
update may depend on where a slice begins and ends. If parameters were cut by the number of devices,
the bits would depend on that number. Therefore every parameter is first cut into *segments*
whose bounds depend on the model alone: multiples of 1024 elements from the parameter's start. The
optimizer always sees segments, even on one device, and a *partition* is a contiguous run of whole
segments.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import pairwise

import torch

from onefold.core.flat import Chunk, Layout, Segment, aligned
from onefold.core.fold import max_blocks
from onefold.core.settings import added_up_in
from onefold.core.stages import StageLayout, Stages

__all__ = [
    "MOST",
    "Frozen",
    "Storage",
    "cut_chunks",
    "cut_partitions",
    "cut_segments",
    "divides_evenly",
]

MOST = 32
"""Maximum number of metrics that a shard logs; a value of several terms uses one for each."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Storage:
    """Layouts of parameters, gradients and buffers, and the numbers of devices and shards.

    The layouts of parameters, gradients and masters have the same entries in the same order, and
    may differ in dtype. A segment covers the same elements in each of them.
    """

    parameters: Layout
    """Trained parameters, in the dtypes that the model computes with."""
    other: Layout
    """All other parameters: frozen, or held by no optimizer."""
    buffers: Layout
    """Buffers of the module."""
    segments: tuple[Segment, ...]
    """Segments of the trained parameters."""
    shards: int
    """Number of shards per batch."""
    devices: int
    """Number of devices."""
    stages: Stages | None = None
    """Stages whose gradients are reduced one stage at a time; None if whole sums are."""
    frozen: Frozen | None = None
    """Frozen parameters that are partitioned among the devices; not part of ``other``."""
    updated_in: torch.dtype | None = None
    """Dtype of the values that the optimizer updates, if the model computes with another one."""
    early: Stages | None = None
    """Stages whose partial sums are sent during backward, one stage at a time; None if whole
    partial sums are sent."""
    mirrors: bool = False
    """Whether each device also sums and updates the segments that others own: every device receives
    all partial sums, by the stages of ``early``, and parameters are not sent."""
    gradients: Layout = field(init=False)
    """Gradients of the trained parameters, in the dtypes of their sums."""
    masters: Layout = field(init=False)
    """Values of the trained parameters, in the dtypes that the optimizer updates."""

    def __post_init__(self) -> None:
        # Computed once, because a step reads these layouts many times.
        masters = self.parameters.converted(lambda dtype: self.updated_in or dtype)
        object.__setattr__(self, "gradients", self.parameters.converted(added_up_in))
        object.__setattr__(self, "masters", masters)

    @property
    def rounds(self) -> bool:
        """Whether the optimizer updates values in other dtypes than the model computes with."""
        return self.masters.dtypes != self.parameters.dtypes

    def rounds_entry(self, number: int) -> bool:
        """Return whether `rounds` is true of one trained parameter."""
        return self.masters.dtype_of(number) != self.parameters.dtype_of(number)

    def segments_of(self, partition: Sequence[int]) -> tuple[Segment, ...]:
        """Return the segments whose numbers are in a partition."""
        return tuple(self.segments[number] for number in partition)

    @property
    def slots(self) -> int:
        """Maximum number of partial sums that a device may have to publish, whatever the shares."""
        # Memory is shared before the first step and must be large enough for later shares. A single
        # device computes the whole sum, and publishes only that.
        return max_blocks(self.shards) if self.devices > 1 and self.stages is None else 1

    def stage_layout(self) -> StageLayout:
        """Return the layout of gradients in memory that holds one stage at a time.

        Raises:
            ValueError: the model is not cut into stages.
        """
        if self.stages is None:
            raise ValueError("this run does not cut the model into stages")
        return StageLayout(self.gradients, self.segments, self.stages)

    def partitioned_layout(self) -> StageLayout:
        """Return the layout of parameters in memory that holds one stage while it is in use.

        Trained parameters come first, followed by partitioned frozen ones.

        Raises:
            ValueError: the model is not cut into stages.
        """
        stages = self.stage_layout().stages
        if self.frozen is None:
            return StageLayout(self.parameters, self.segments, stages)
        layout = side_by_side(self.parameters, self.frozen.layout)
        stages = replace(stages, stage_of=stages.stage_of + self.frozen.stage_of)
        return StageLayout(layout, self.partitioned_segments(), stages)

    def partitioned_segments(self) -> tuple[Segment, ...]:
        """Return the segments of `partitioned_layout`."""
        if self.frozen is None:
            return self.segments
        first = len(self.parameters.entries)
        counted_on = (
            replace(segment, entry=first + segment.entry) for segment in self.frozen.segments
        )
        return (*self.segments, *counted_on)

    def kept(self, partitions: Sequence[Sequence[int]]) -> list[tuple[int, ...]]:
        """Return the segments of `partitioned_segments` that each device keeps.

        Args:
            partitions: for each device, the segments of the trained parameters that it updates.
        """
        if self.frozen is None:
            return [tuple(partition) for partition in partitions]
        first = len(self.segments)
        pairs = zip(partitions, self.frozen.partitions, strict=True)
        return [(*partition, *(first + number for number in frozen)) for partition, frozen in pairs]

    @property
    def table_host_bytes(self) -> tuple[int, ...]:
        """Sizes of the table's weights, gave, changed, kinds and left_out, aligned, in bytes."""
        # (V,) float64 weights, (devices, parameters) int32 of gave, (V, buffers) uint8 of changed,
        # (V,) int64 of kinds and of left_out.
        gave, numbers = self.devices * len(self.parameters.entries) * 4, self.shards * 8
        changed = self.shards * len(self.buffers.entries)
        return tuple(map(aligned, (numbers, gave, changed, numbers, numbers)))

    @property
    def table_device_bytes(self) -> int:
        """Size of the table's totals and digests, metrics, and one row of buffers per shard, in
        bytes."""
        # (V, 2) totals and digests. They come first, so that the rows start at an aligned offset.
        rows = self.shards * self.buffers.nbytes
        return aligned(self.shards * 16) + self.table_values_bytes + rows

    @property
    def table_values_bytes(self) -> int:
        """Size of the table's memory for metrics, in bytes."""
        # (V, MOST, 2) float64: totals and weights.
        return aligned(self.shards * MOST * 2 * 8)


@dataclass(frozen=True, slots=True)
class Frozen:
    """The frozen parameters that belong to stages, and their partition among the devices."""

    layout: Layout
    """Layout of all of these parameters together."""
    stage_of: tuple[int, ...]
    """Stage of each parameter; never the root."""
    segments: tuple[Segment, ...]
    """Segments of these parameters."""
    partitions: tuple[Sequence[int], ...]
    """Segments that each device keeps, in ascending order; contiguous within each stage."""


def side_by_side(one: Layout, other: Layout) -> Layout:
    """Concatenate two layouts; the entries of the second one keep separate sections."""
    first = len(one.dtypes)
    moved = tuple(replace(entry, section=entry.section + first) for entry in other.entries)
    return Layout(one.entries + moved, one.dtypes + other.dtypes, one.numels + other.numels)


# Fused kernels give the same bits for any slice cut at a multiple of this; see the note above.
_PIECE_MULTIPLE_NUMEL = 1024
# Smaller segments would cost more in kernel launches than they gain in balance.
_SMALLEST_PIECE_NUMEL = 16 * 1024
# Enough to balance many devices, few enough to loop over in every step.
_PIECES_OF_A_MODEL = 256
# A chunk that is moved or added is still in the CPU cache when its next operand arrives.
_CHUNK_BYTES = 4 << 20


def cut_segments(layout: Layout, *, by_element: bool) -> tuple[Segment, ...]:
    """Cut every entry into segments, ordered by section and offset.

    Args:
        layout: layout of the parameters.
        by_element: whether an entry may be divided; if False, each entry is one segment.
    """
    # Do not use the number of devices here: see the note on segments.
    total = sum(entry.numel for entry in layout.entries)
    step = -(-total // (_PIECES_OF_A_MODEL * _PIECE_MULTIPLE_NUMEL)) * _PIECE_MULTIPLE_NUMEL
    step = max(step, _SMALLEST_PIECE_NUMEL)
    # Sort by section, so that a partition covers few long ranges instead of alternating between
    # dtypes. The sort is stable, which keeps the order of offsets within a section.
    ordered = sorted(range(len(layout.entries)), key=lambda i: layout.entries[i].section)
    segments: list[Segment] = []
    for index in ordered:
        numel = layout.entries[index].numel
        if numel <= step or not by_element:
            segments.append(Segment(index, 0, numel, whole=True))
            continue
        starts = range(0, numel, step)
        segments.extend(Segment(index, s, min(s + step, numel), whole=False) for s in starts)
    return tuple(segments)


def cut_partitions(
    segments: Sequence[Segment], devices: int, stages: Stages | None = None
) -> tuple[Sequence[int], ...]:
    """Divide the segments among the devices, balanced by elements.

    Args:
        segments: segments of the model.
        devices: number of devices.
        stages: stages of the model, if the segments of each stage are divided among the devices
            that compute it: all of them, or one in each pipeline.

    Returns:
        Segment numbers of each device, in ascending order, pipeline after pipeline. They are
        contiguous, or contiguous within each stage.
    """
    if stages is None:
        return _cut_row(segments, devices)
    of_stage: dict[int, list[int]] = {}
    for number, segment in enumerate(segments):
        of_stage.setdefault(stages.stage_of[segment.entry], []).append(number)
    partitions: list[list[int]] = [[] for _ in range(devices)]
    numels = [0] * devices
    for stage, numbers in sorted(of_stage.items()):
        place = stages.places[stage] if stages.places else 0
        computing = range(place, devices, stages.pipeline)
        cuts = _cut_row([segments[number] for number in numbers], len(computing))
        rows = [[numbers[index] for index in cut] for cut in cuts]
        sizes = [sum(segments[number].numel for number in row) for row in rows]
        # Parts of a stage differ in size: the largest goes to the device with the fewest elements.
        largest_first = sorted(range(len(rows)), key=lambda index: -sizes[index])
        least_first = sorted(computing, key=numels.__getitem__)
        for device, index in zip(least_first, largest_first, strict=True):
            partitions[device] += rows[index]
            numels[device] += sizes[index]
    return tuple(tuple(sorted(partition)) for partition in partitions)


_MOST_UNEVEN = 1.25


def divides_evenly(segments: Sequence[Segment], devices: int, stages: Stages) -> bool:
    """Return whether partitions that have a part of every stage are about equal in size."""
    partitions = cut_partitions(segments, devices, stages)
    largest = max(sum(segments[number].numel for number in each) for each in partitions)
    return largest <= _MOST_UNEVEN * sum(segment.numel for segment in segments) / devices


def _cut_row(segments: Sequence[Segment], devices: int) -> tuple[range, ...]:
    """Divide the segments into one contiguous range per device."""
    total = sum(segment.numel for segment in segments)
    cuts = [0]
    seen = 0
    for index, segment in enumerate(segments):
        # A segment goes to the device whose even share of the elements contains its middle. So a
        # segment across a boundary goes to the device that holds more of it.
        middle = seen + segment.numel / 2
        while len(cuts) < devices and middle >= total * len(cuts) / devices:
            cuts.append(index)
        seen += segment.numel
    # With more devices than segments, the last devices get empty partitions and only run their
    # shards.
    cuts += [len(segments)] * (devices + 1 - len(cuts))
    return tuple(range(start, stop) for start, stop in pairwise(cuts))


def cut_chunks(
    layout: Layout, partition: Sequence[Segment], *, at_once: bool = False
) -> list[Chunk]:
    """Return the ranges that a partition covers, cut to fit into the CPU cache.

    Args:
        layout: layout of the segments.
        partition: segments in ascending order; some may be missing.
        at_once: whether ranges are moved and added whole, as on accelerators, where each one
            costs a message and a launch. All gradients must then be in flat memory.
    """
    ordered = sorted(layout.entries, key=lambda entry: (entry.section, entry.offset))
    # Look up the next offset instead of computing it: in a layout converted to wider dtypes, the
    # gap between two entries is larger than its own alignment implies.
    following = {(a.section, a.offset + a.numel): b.offset for a, b in pairwise(ordered)}
    stretches: list[Chunk] = []
    for segment in partition:
        entry = layout.entries[segment.entry]
        large = segment.entry if layout.is_large(segment.entry) and not at_once else None
        stretch = Chunk(
            entry.section, entry.offset + segment.start, entry.offset + segment.stop, large
        )
        # Join neighbors, so that one kernel adds small tensors, padding included. Keep a large
        # entry apart, because its gradient may be outside flat memory.
        if stretches and _follows(stretches[-1], stretch, following):
            stretches[-1] = stretches[-1]._replace(stop=stretch.stop)
        elif segment.numel:
            stretches.append(stretch)
    if at_once:
        return stretches
    steps = [_CHUNK_BYTES // dtype.itemsize for dtype in layout.dtypes]
    return [
        stretch._replace(start=start, stop=min(start + steps[stretch.section], stretch.stop))
        for stretch in stretches
        for start in range(stretch.start, stretch.stop, steps[stretch.section])
    ]


def _follows(before: Chunk, stretch: Chunk, following: Mapping[tuple[int, int], int]) -> bool:
    """Return whether only padding separates two ranges, of small entries or of the same one."""
    alike = (before.section, before.entry) == (stretch.section, stretch.entry)
    end = before.section, before.stop
    return alike and stretch.start in (before.stop, following.get(end))
