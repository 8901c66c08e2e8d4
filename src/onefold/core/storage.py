"""The sizes of everything that the devices of a run share, and how a layout is cut. Pure.

A layout is cut into segments, these into a partition for each device, and partitions into chunks.

Of `Frozen` parameters each device may keep a part, as it does of the trained ones. Nothing is
computed from the bounds of these parts, so that they may depend on the devices. Their segments are
counted on from those of the trained parameters, and follow them in the memory of a stage.

Note: why segments
----------------
An optimizer kernel is free to treat the tail of a tensor differently from its middle, so the bits
of an update may depend on where a slice begins and ends. If parameters were cut according to the
number of devices, so would the bits be. Therefore every parameter is first cut into *segments*
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
"""The most numbers beside the loss of a shard; a value of several terms has one for each."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Storage:
    """The layouts of parameters, gradients and buffers, and the numbers of devices and shards.

    The layouts of parameters, gradients and masters have the same entries in the same order, and
    may differ in dtype. A segment is the same stretch of elements in each of them.
    """

    parameters: Layout
    """The trained parameters, in the dtypes in which models compute with them."""
    other: Layout
    """The rest of the parameters: frozen ones, and those that no optimizer holds."""
    buffers: Layout
    """The module's buffers."""
    segments: tuple[Segment, ...]
    """The segments of the trained parameters."""
    shards: int
    """How many shards every batch is cut into."""
    devices: int
    """How many devices take part."""
    stages: Stages | None = None
    """The stages after each of which gradients are handed over; None if whole sums are."""
    frozen: Frozen | None = None
    """Frozen parameters of which each device keeps a part; they are not among the other ones."""
    updated_in: torch.dtype | None = None
    """The dtype of the values that the optimizer updates, where models compute with another one."""
    early: Stages | None = None
    """The stages after each of which a device sends its partial sum of it, while backward goes on;
    None if it sends whole partial sums."""
    mirrors: bool = False
    """Whether each device also adds up and updates the segments that others own: all partial sums
    go to all devices, `early`, and no parameters do."""
    gradients: Layout = field(init=False)
    """Gradients of the trained parameters, in the dtypes in which they are added up."""
    masters: Layout = field(init=False)
    """Values of the trained parameters, in the dtypes in which the optimizer updates them."""

    def __post_init__(self) -> None:
        # Once, as they are asked for many times in a step.
        masters = self.parameters.converted(lambda dtype: self.updated_in or dtype)
        object.__setattr__(self, "gradients", self.parameters.converted(added_up_in))
        object.__setattr__(self, "masters", masters)

    @property
    def rounds(self) -> bool:
        """Whether models compute with other values, rounded ones, than the optimizer updates."""
        return self.masters.dtypes != self.parameters.dtypes

    def rounds_entry(self, number: int) -> bool:
        """Whether that is so for one trained parameter."""
        return self.masters.dtype_of(number) != self.parameters.dtype_of(number)

    def segments_of(self, partition: Sequence[int]) -> tuple[Segment, ...]:
        """The segments of a partition, which is given by their numbers."""
        return tuple(self.segments[number] for number in partition)

    @property
    def slots(self) -> int:
        """The most partial sums that a device may have to publish, whatever the shares are."""
        # Memory is shared before the first step, and later shares must fit into it. One device adds
        # everything up itself, and publishes a single sum.
        return max_blocks(self.shards) if self.devices > 1 and self.stages is None else 1

    def stage_layout(self) -> StageLayout:
        """Where gradients lie in memory that holds one stage at a time.

        Raises:
            ValueError: whole sums are handed over.
        """
        if self.stages is None:
            raise ValueError("expected a model that is cut into stages")
        return StageLayout(self.gradients, self.segments, self.stages)

    def partitioned_layout(self) -> StageLayout:
        """Where the parameters of a stage lie in memory that holds it while it is needed.

        The trained ones come first, and then the frozen ones of which devices keep parts.

        Raises:
            ValueError: whole sums are handed over.
        """
        stages = self.stage_layout().stages
        if self.frozen is None:
            return StageLayout(self.parameters, self.segments, stages)
        layout = side_by_side(self.parameters, self.frozen.layout)
        stages = replace(stages, stage_of=stages.stage_of + self.frozen.stage_of)
        return StageLayout(layout, self.partitioned_segments(), stages)

    def partitioned_segments(self) -> tuple[Segment, ...]:
        """The segments of what `partitioned_layout` lays out."""
        if self.frozen is None:
            return self.segments
        first = len(self.parameters.entries)
        counted_on = (
            replace(segment, entry=first + segment.entry) for segment in self.frozen.segments
        )
        return (*self.segments, *counted_on)

    def kept(self, partitions: Sequence[Sequence[int]]) -> list[tuple[int, ...]]:
        """For each device, which segments of `partitioned_segments` it keeps.

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
        """Bytes of the table's weights, gave, changed, kinds and left_out, each aligned."""
        # (V,) float64 weights, (devices, parameters) int32 of gave, (V, buffers) uint8 of changed,
        # (V,) int64 of kinds and of left_out.
        gave, numbers = self.devices * len(self.parameters.entries) * 4, self.shards * 8
        changed = self.shards * len(self.buffers.entries)
        return tuple(map(aligned, (numbers, gave, changed, numbers, numbers)))

    @property
    def table_device_bytes(self) -> int:
        """Bytes of the table's totals and digests, its values, and a row of buffers a shard."""
        # (V, 2) totals and digests. They come first, so that the rows begin at an aligned place.
        rows = self.shards * self.buffers.nbytes
        return aligned(self.shards * 16) + self.table_values_bytes + rows

    @property
    def table_values_bytes(self) -> int:
        """Bytes of the table's room for what losses return beside themselves."""
        # (V, MOST, 2) float64: totals and weights.
        return aligned(self.shards * MOST * 2 * 8)


@dataclass(frozen=True, slots=True)
class Frozen:
    """The frozen parameters that lie in stages, and what each device keeps of them."""

    layout: Layout
    """Of all of them together."""
    stage_of: tuple[int, ...]
    """The stage of each; none is of the root."""
    segments: tuple[Segment, ...]
    """What they are cut into."""
    partitions: tuple[Sequence[int], ...]
    """For each device, the segments that it keeps, in ascending order: of each stage neighbors."""


def side_by_side(one: Layout, other: Layout) -> Layout:
    """The entries of one layout and then those of another one, in sections of their own."""
    first = len(one.dtypes)
    moved = tuple(replace(entry, section=entry.section + first) for entry in other.entries)
    return Layout(one.entries + moved, one.dtypes + other.dtypes, one.numels + other.numels)


# Fused kernels give the same bits for any slice cut at a multiple of this: see the note on
# segments.
_PIECE_MULTIPLE_NUMEL = 1024
# Smaller segments would cost the optimizer more in calls of kernels than they even out.
_SMALLEST_PIECE_NUMEL = 16 * 1024
# Enough to give each of many devices an even partition, few enough to loop over in every step.
_PIECES_OF_A_MODEL = 256
# What is moved or added at a time still lies in the cache when its next operand arrives.
_CHUNK_BYTES = 4 << 20


def cut_segments(layout: Layout, *, by_element: bool) -> tuple[Segment, ...]:
    """Cut every entry into segments, in the order of sections and offsets.

    Args:
        layout: of the parameters.
        by_element: whether an entry may be divided; if not, every segment is whole.
    """
    # Nothing here may depend on the number of devices: see the note on segments.
    total = sum(entry.numel for entry in layout.entries)
    step = -(-total // (_PIECES_OF_A_MODEL * _PIECE_MULTIPLE_NUMEL)) * _PIECE_MULTIPLE_NUMEL
    step = max(step, _SMALLEST_PIECE_NUMEL)
    # By section: a partition then covers few long stretches rather than jumping between dtypes. The
    # sort is stable, so offsets stay in order within a section.
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
        segments: of the model.
        devices: how many there are.
        stages: of the model, if the segments of every stage are to be divided among the devices
            that compute it: all of them, or one in each pipeline.

    Returns:
        For each device, pipeline after pipeline, the numbers of its segments in ascending order:
        neighbors, or neighbors of each stage.
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
        # A stage has few segments, and its parts may differ much: the largest goes to whom has
        # least.
        largest_first = sorted(range(len(rows)), key=lambda index: -sizes[index])
        least_first = sorted(computing, key=numels.__getitem__)
        for device, index in zip(least_first, largest_first, strict=True):
            partitions[device] += rows[index]
            numels[device] += sizes[index]
    return tuple(tuple(sorted(partition)) for partition in partitions)


_MOST_UNEVEN = 1.25


def divides_evenly(segments: Sequence[Segment], devices: int, stages: Stages) -> bool:
    """Whether partitions that have a part of every stage are of about one size."""
    partitions = cut_partitions(segments, devices, stages)
    largest = max(sum(segments[number].numel for number in each) for each in partitions)
    return largest <= _MOST_UNEVEN * sum(segment.numel for segment in segments) / devices


def _cut_row(segments: Sequence[Segment], devices: int) -> tuple[range, ...]:
    """Divide the segments into one row of neighbors for each device."""
    total = sum(segment.numel for segment in segments)
    cuts = [0]
    seen = 0
    for index, segment in enumerate(segments):
        # A segment goes to the device in whose even share of the elements its middle lies, so that
        # a segment across a boundary goes to the device that holds more of it.
        middle = seen + segment.numel / 2
        while len(cuts) < devices and middle >= total * len(cuts) / devices:
            cuts.append(index)
        seen += segment.numel
    # More devices than segments: the last devices get empty partitions, and merely run their
    # shards.
    cuts += [len(segments)] * (devices + 1 - len(cuts))
    return tuple(range(start, stop) for start, stop in pairwise(cuts))


def cut_chunks(
    layout: Layout, partition: Sequence[Segment], *, at_once: bool = False
) -> list[Chunk]:
    """The stretches that a partition covers, cut small enough for the processor's cache.

    Args:
        layout: which the segments belong to.
        partition: segments in ascending order, of which some may be left out.
        at_once: whether stretches are moved and added whole, as on accelerators: each costs a
            message and a launch there. All gradients must then lie in flat memory.
    """
    ordered = sorted(layout.entries, key=lambda entry: (entry.section, entry.offset))
    # Looked up and not computed: of a layout in wider dtypes more lies between two entries than
    # its own alignment says.
    following = {(a.section, a.offset + a.numel): b.offset for a, b in pairwise(ordered)}
    stretches: list[Chunk] = []
    for segment in partition:
        entry = layout.entries[segment.entry]
        large = segment.entry if layout.is_large(segment.entry) and not at_once else None
        stretch = Chunk(
            entry.section, entry.offset + segment.start, entry.offset + segment.stop, large
        )
        # Neighbors are joined, so that small tensors are added in one kernel, padding included. A
        # large one stays apart from its neighbors: its gradient may lie outside the flat memory.
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
    """Whether there is nothing but padding between two stretches, of small entries or of one."""
    alike = (before.section, before.entry) == (stretch.section, stretch.entry)
    end = before.section, before.stop
    return alike and stretch.start in (before.stop, following.get(end))
