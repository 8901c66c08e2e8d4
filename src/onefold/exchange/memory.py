"""Stores the trained and frozen parameters, the partial sums and the table of a run.

`Memory` belongs to this process's devices. `FrozenMemory` is one device's part of the frozen
parameters if each of several devices keeps a part. A partial sum is `Partial`, `PartitionTensors`
or `LocalGradients`, depending on which process reads it.

Note: where a partial sum is stored
-----------------------------------
Backward creates one gradient tensor per parameter. Small ones are copied side by side into flat
memory, where neighbors are moved and added as one. Large ones stay where backward put them, because
copying them would cost as much as adding them; only what another process must see in shared memory
is copied. On an accelerator all are copied, by one kernel.
"""

from __future__ import annotations

import mmap
from abc import ABC, abstractmethod
from bisect import bisect_right
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import accumulate
from typing import Any, NamedTuple, Protocol

import torch

from onefold.core.assignment import Assignment
from onefold.core.flat import (
    Chunk,
    Entry,
    FlatTensors,
    Layout,
    Segment,
    laid_out,
    same_bits,
    storage_order,
)
from onefold.core.fold import Published
from onefold.core.results import Gradients
from onefold.core.shard import Shares
from onefold.core.stages import StageLayout
from onefold.core.storage import Frozen, Storage, cut_chunks
from onefold.exchange.shard_table import ShardTable
from onefold.system.allocator import DEFAULT_ALLOCATOR, TensorAllocator
from onefold.system.compat import copy_each

__all__ = [
    "Arrivals",
    "FirstValues",
    "FrozenMemory",
    "LocalGradients",
    "Memory",
    "Partial",
    "PartitionSums",
    "PartitionTensors",
    "Start",
    "by_stage",
    "cut_segment",
    "shape_segment",
    "write_first",
]


class PartitionSums(Protocol):
    """Memory that holds at least one partition of the layout of trained parameters."""

    def chunk(self, chunk: Chunk) -> torch.Tensor:
        """Return a view of one chunk, (stop - start,) in the dtype of its section."""

    def segment(self, segment: Segment) -> torch.Tensor | None:
        """Return a view of one segment: in the entry's shape if it is whole, else (numel,).

        None if no shard gave a gradient.
        """


class PartitionTensors:
    """Memory for one partition of a layout, for an owner's receives from the other devices.

    Args:
        layout: the layout that the segments belong to.
        partition: its segments, in ascending order.
        device: where to allocate.
    """

    def __init__(self, layout: Layout, partition: Sequence[Segment], device: torch.device) -> None:
        self._layout = layout
        stretches: dict[int, list[Chunk]] = {}
        # Neighboring chunks become one stretch, so that few offsets have to be searched.
        for chunk in sorted(cut_chunks(layout, partition, at_once=True)):
            stretches.setdefault(chunk.section, []).append(chunk)
        self._sections: dict[int, torch.Tensor] = {}
        self._starts: dict[int, list[int]] = {}
        self._places: dict[int, list[int]] = {}
        """Start of each stretch in its section, and in this memory."""
        for section, own in stretches.items():
            sizes = [each.stop - each.start for each in own]
            dtype = layout.dtypes[section]
            self._sections[section] = torch.zeros(sum(sizes), dtype=dtype, device=device)
            self._starts[section] = [each.start for each in own]
            self._places[section] = [0, *accumulate(sizes)]

    def chunk(self, chunk: Chunk) -> torch.Tensor:
        """Return a view of one chunk, (stop - start,)."""
        starts = self._starts[chunk.section]
        number = bisect_right(starts, chunk.start) - 1
        first = self._places[chunk.section][number] + chunk.start - starts[number]
        return self._sections[chunk.section][first : first + chunk.stop - chunk.start]

    def segment(self, segment: Segment) -> torch.Tensor:
        """Return a view of one segment: in the entry's shape if it is whole, else (numel,)."""
        entry = self._layout.entries[segment.entry]
        start = entry.offset + segment.start
        flat = self.chunk(Chunk(entry.section, start, start + segment.numel, None))
        return shape_segment(flat, segment, entry)


class Partial:
    """Gradients of one block: large ones where backward left them, the others in flat memory.

    Args:
        flat: has room for all gradients, including large ones.
        copies_all: whether large gradients are copied too.
    """

    def __init__(self, flat: FlatTensors, *, copies_all: bool = False) -> None:
        self.flat = flat
        self._visible: list[Chunk] = []
        self._copies_all = copies_all
        numbers = () if copies_all else range(len(flat.views))
        self._large = {n for n in numbers if flat.layout.is_large(n)}
        self._direct: dict[int, torch.Tensor] = {}

    @classmethod
    def private(cls, layout: Layout, device: torch.device) -> Partial:
        """Make a partial sum that is read only through this object.

        Its flat memory is not cleared.
        """
        if device.type == "cpu":
            # Untouched pages take no memory, so the room that large gradients leave empty is free.
            return cls(FlatTensors(layout, memory=_untouched(layout.nbytes)))
        memory = torch.empty(layout.nbytes, dtype=torch.uint8, device=device)
        # Copy all: a partition is then one message and one addition. Each tensor by itself would
        # cost a launch, and NCCL hangs in groups of very many messages.
        return cls(FlatTensors(layout, memory=memory), copies_all=True)

    def show(self, visible: Sequence[Chunk]) -> None:
        """Copy these chunks to ``flat`` at every `write`: other processes read them there."""
        # A chunk without an entry consists of small gradients, which are in flat memory anyway.
        self._visible = [chunk for chunk in visible if chunk.entry is not None]

    def write(self, gradients: Sequence[torch.Tensor | None]) -> None:
        """Adopt one gradient for each entry; None stands for zeros."""
        self.release()
        self.write_some(range(len(gradients)), gradients)
        # Other processes see only the file behind shared memory, so copy there what they will read.
        shown = [chunk for chunk in self._visible if chunk.entry in self._direct]
        if shown:
            targets = [self.flat.chunk(chunk) for chunk in shown]
            copy_each(targets, [self.chunk(chunk) for chunk in shown])

    def hold(self, gradients: Gradients) -> Gradients:
        """Move a sum to the place of the final sum (see `write_some`), before more is added to it.

        Returns:
            The gradients in their new places. A gradient is not moved if `write_some` would not
            copy it, or would change its dtype.
        """
        moved = {
            number: (self.flat.views[number], gradient)
            for number, gradient in enumerate(gradients)
            if gradient is not None and gradient.dtype == self.flat.views[number].dtype
        }
        if not self._copies_all or not moved:
            return gradients
        copy_each(*map(list, zip(*moved.values(), strict=True)))
        return [moved[n][0] if n in moved else each for n, each in enumerate(gradients)]

    def write_some(self, numbers: Iterable[int], gradients: Iterable[torch.Tensor | None]) -> None:
        """Adopt the gradients of some entries, by number; keep the others."""
        views, sources = [], []
        for number, gradient in zip(numbers, gradients, strict=True):
            view = self.flat.views[number]
            if gradient is view:
                # `hold` moved it here already.
                continue
            # Zero it, because the memory still holds the values of the previous step.
            if gradient is None:
                view.zero_()
            # Segments are cut by offset, so a gradient can stay only if its strides are those of
            # its entry. Autograd may return other strides, such as those of a transposed tensor.
            elif (
                number in self._large
                and gradient.stride() == self.flat.layout.entries[number].stride
                and gradient.dtype == view.dtype
            ):
                self._direct[number] = gradient
            else:
                views.append(view)
                sources.append(gradient)
        if views:
            # Copy in one call, which is one kernel on an accelerator instead of one per tensor.
            copy_each(views, sources)

    def chunk(self, chunk: Chunk) -> torch.Tensor:
        """Return a view of one chunk, (stop - start,), wherever it is stored."""
        gradient = None if chunk.entry is None else self._direct.get(chunk.entry)
        if gradient is None or chunk.entry is None:
            return self.flat.chunk(chunk)
        offset = self.flat.layout.entries[chunk.entry].offset
        return storage_order(gradient)[chunk.start - offset : chunk.stop - offset]

    def segment(self, segment: Segment) -> torch.Tensor:
        """Return a view of one segment: in the entry's shape if it is whole, else (numel,)."""
        gradient = self._direct.get(segment.entry)
        if gradient is None:
            return self.flat.segment(segment)
        return cut_segment(gradient, segment, self.flat.layout.entries[segment.entry])

    def release(self) -> None:
        """Drop the adopted gradients, so that their memory can be reused."""
        self._direct = {}


class LocalGradients:
    """Gradients where backward left them, read only by the device that computed them.

    Args:
        layout: the layout of the gradients.
    """

    def __init__(self, layout: Layout) -> None:
        self._entries = layout.entries
        self._gradients: Sequence[torch.Tensor | None] = ()
        self._cut: dict[int, tuple[torch.Tensor, ...]] = {}
        """Segments of each entry that is cut, by its number; made together, in one call."""

    def write(self, gradients: Sequence[torch.Tensor | None]) -> None:
        """Adopt one gradient for each entry, in its shape; None if no shard gave one."""
        self._gradients, self._cut = gradients, {}

    def chunk(self, chunk: Chunk) -> torch.Tensor:
        """Refuse: a single partial sum is added to nothing, so no caller needs its chunks."""
        raise TypeError("a single partial sum is not cut into chunks: nothing is added to it")

    def segment(self, segment: Segment) -> torch.Tensor | None:
        """Return a view of one segment: in the entry's shape if it is whole, else (numel,)."""
        gradient = self._gradients[segment.entry]
        if gradient is None or segment.whole:
            return gradient
        # `torch.split` cuts all at once: every segment but the last has the length of the first.
        if segment.start == 0:
            laid = laid_out(gradient, self._entries[segment.entry].stride)
            self._cut[segment.entry] = torch.split(storage_order(laid), segment.numel)
        if (cut := self._cut.get(segment.entry)) is None:
            return cut_segment(gradient, segment, self._entries[segment.entry])
        return cut[segment.start // cut[0].numel()]

    def release(self) -> None:
        """Drop the gradients taken over by `write`."""
        self._gradients, self._cut = (), {}


def cut_segment(gradient: torch.Tensor, segment: Segment, entry: Entry) -> torch.Tensor:
    """Cut a segment from a gradient: in the entry's shape if it is whole, else (numel,)."""
    laid = laid_out(gradient, entry.stride)
    return laid if segment.whole else storage_order(laid)[segment.start : segment.stop]


def shape_segment(flat: torch.Tensor, segment: Segment, entry: Entry) -> torch.Tensor:
    """View a segment, (numel,) in storage order, in the entry's shape if it is whole."""
    # A whole segment gets the parameter's own strides; a part is a run of its storage.
    return flat.as_strided(entry.shape, entry.stride) if segment.whole else flat


def by_stage(layout: StageLayout, numbers: Sequence[int]) -> list[list[int]]:
    """Sort the numbers of some segments by their stages."""
    own = frozenset(numbers)
    return [[number for number in stage if number in own] for stage in layout.segments]


def _untouched(nbytes: int) -> torch.Tensor:
    """Return CPU memory that takes no room until it is written: (nbytes,) uint8."""
    # PyTorch's allocator may reuse memory of earlier gradients, whose pages are resident.
    # MAP_PRIVATE: shared pages would not be huge pages, and forked data workers would share them.
    pages = mmap.mmap(-1, max(nbytes, 1), flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    return torch.frombuffer(pages, dtype=torch.uint8)[:nbytes]


class FrozenMemory:
    """The frozen parameters of a device: its part for the whole run, and all of them when needed.

    Segments have the numbers of `Storage.partitioned_segments`.

    Args:
        storage: the sizes.
        frozen: the layout and partitions of the frozen parameters.
        rank: number of the device.
        device: the device that computes.
        allocator: allocates the device's part if that is kept in other memory.
    """

    def __init__(
        self,
        storage: Storage,
        frozen: Frozen,
        rank: int,
        device: torch.device,
        allocator: TensorAllocator = DEFAULT_ALLOCATOR,
    ) -> None:
        self.flat = FlatTensors(frozen.layout, device=device, there=False)
        """All frozen parameters, while they are needed."""
        self._first_segment, self._first = len(storage.segments), len(storage.parameters.entries)
        self._segments = storage.partitioned_segments()
        self._layout = layout = storage.partitioned_layout()
        own = [self._first_segment + number for number in frozen.partitions[rank]]
        self._own = by_stage(layout, own)
        # Own segments of a stage are stored side by side, as in a buffer for the whole stage.
        segments = [self._segments[number] for number in own]
        self._kept_layout = StageLayout(layout.layout, segments, layout.stages)
        self._places = {number: place for place, number in enumerate(own)}
        self._kept = [
            allocator.empty(nbytes)
            if allocator.apart
            else torch.empty(nbytes, dtype=torch.uint8, device=device)
            for nbytes in self._kept_layout.stage_bytes
        ]
        self.stages = sorted(set(frozen.stage_of))
        """The stages that have frozen parameters."""
        # A device cannot compute with parameters in other memory, such as a file.
        self._is_all = [
            not allocator.apart
            and len(mine) == sum(number >= self._first_segment for number in numbers)
            for mine, numbers in zip(self._own, layout.segments, strict=True)
        ]

    @property
    def numbers(self) -> list[int]:
        """Numbers of the segments that this device keeps."""
        return [number for own in self._own for number in own]

    def entry_of(self, number: int) -> int:
        """Return the number of a segment's parameter; the trained parameters come first."""
        return self._segments[number].entry

    def part(self, number: int) -> torch.Tensor:
        """Return a segment that this device keeps: (numel,) in storage order."""
        stage = self._layout.stages.stage_of[self.entry_of(number)]
        return self._kept_layout.in_room(self._places[number], self._kept[stage])

    def keep(self) -> None:
        """Store this device's part of `flat`, if the memory of `flat` exists now."""
        for number in self.numbers if self.flat.is_there else ():
            self.part(number).copy_(self._in_flat(number))

    def adopt_entry(self, entry: int, values: torch.Tensor) -> None:
        """Store this device's part of a parameter: (numel,) in storage order, on any device."""
        for number in self.numbers:
            segment = self._segments[number]
            if segment.entry == self._first + entry:
                self.part(number).copy_(values[segment.start : segment.stop])

    def has_all_of(self, stage: int) -> bool:
        """Whether all frozen parameters of a stage are stored where this device computes.

        Always False if this device keeps its part in other memory, such as a file; otherwise True
        for a stage without frozen parameters.
        """
        return self._is_all[stage]

    def bytes_before(self, stage: int) -> int:
        """Return the bytes of a stage's buffer without frozen parameters."""
        own = self._layout.segments[stage]
        # Frozen segments come last in a stage, so the first one's offset is the size of the rest.
        frozen = [number for number in own if number >= self._first_segment]
        return self._layout.places[frozen[0]][0] if frozen else self._layout.stage_bytes[stage]

    def view(self, number: int) -> torch.Tensor:
        """View a parameter of a stage that is kept as a whole, by its number as in `entry_of`."""
        stage = self._layout.stages.stage_of[number]
        return self._kept_layout.whole(number, self._kept[stage])

    def written(self, stage: int, buffer: torch.Tensor) -> int | None:
        """Find a parameter in a stage's buffer that differs from what this device keeps."""
        # If the stage is stored here, the buffer is what is kept, so a write cannot be detected.
        numbers = [] if self._is_all[stage] else self._own[stage]
        return self._changed(numbers, lambda number: self._layout.in_room(number, buffer))

    def written_in_flat(self) -> int | None:
        """Find a parameter in `flat` that differs from what this device keeps."""
        return self._changed(self.numbers, self._in_flat)

    def _changed(self, numbers: Sequence[int], view: Callable[[int], torch.Tensor]) -> int | None:
        # Compare bits: as values, NaN is unequal to itself, and 0.0 equal to -0.0.
        changed = (n for n in numbers if not same_bits(view(n), self.part(n)))
        return next(map(self.entry_of, changed), None)

    def _in_flat(self, number: int) -> torch.Tensor:
        segment = self._segments[number]
        view = self.flat.views[segment.entry - self._first]
        return storage_order(view)[segment.start : segment.stop]


class FirstValues(Protocol):
    """Values of a tensor that are drawn when they are needed."""

    def write_to(self, view: torch.Tensor) -> None:
        """Draw the values into a tensor of their shape, on any device."""


@dataclass(frozen=True, slots=True)
class Start:
    """First values of a process; the lead's replace the values of all others."""

    trained: Sequence[torch.Tensor | FirstValues]
    """The trained parameters, in the order of the layout."""
    other: Sequence[torch.Tensor | FirstValues]
    """The other parameters."""
    buffers: FlatTensors
    """The module's buffers; overwritten unless this process is the lead."""
    frozen: Sequence[torch.Tensor | FirstValues] = ()
    """Frozen parameters that are partitioned among devices."""


class Arrivals(NamedTuple):
    """Partial sums that are still on their way to the owners of partitions."""

    wait_for: Callable[[int], None]
    """Waits until the chunk of this number of the own partition has arrived from all devices."""
    finish: Callable[[], None]
    """Waits until everything is received and sent."""


class Memory(ABC):
    """Memory of this process's devices, and their view of the memory of others.

    Args:
        storage: the sizes.
        assignment: which device runs which shards and owns which partition.
        allocator: allocates the large parts of this process's host memory.

    Methods are called in the order of a step: `start_step`; `publish` for each block, or
    `publish_stage` for each stage of the last block; `collect`; `partial` for each block and owned
    partition; `publish_parameters`; `release`. `collect`, `publish_parameters` and
    `broadcast_from_lead` are collective, and may block if other processes take part.
    """

    table: ShardTable
    """This process's rows may be written before ``collect``; all rows may be read after it."""
    trained: dict[int, FlatTensors]
    """The trained parameters, by number of this process's devices."""
    other: dict[int, FlatTensors]
    """The other parameters, by number of this process's devices."""
    frozen: FrozenMemory | None = None
    """This device's part of the frozen parameters, if it does not keep all."""
    _own: Mapping[Any, Partial | LocalGradients]
    """The partial sums that this process's devices publish."""
    is_common: bool = False
    """Whether all processes share the memory of the parameters."""
    is_partitioned: bool = False
    """Whether each device keeps only its partition of the trained parameters, and gathers others
    when it needs them. Memory for all of them then exists only while they are gathered."""

    def __init__(
        self, storage: Storage, assignment: Assignment, allocator: TensorAllocator
    ) -> None:
        self.storage, self.allocator = storage, allocator
        self.assignment = assignment
        """Which device owns which partition; its shares are the first ones of the run."""
        owned = [storage.segments_of(each) for each in assignment.partitions]
        self.partitions = [storage.segments] * len(owned) if storage.mirrors else owned
        """Segments whose partial sums each device adds up: its own, or all."""
        self.at_once = any(device.type != "cpu" for device in assignment.devices)
        """Whether neighboring chunks are moved and added as one, because each launch takes time."""
        self._cut = partial(cut_chunks, at_once=self.at_once)
        self.summed = [self._cut(storage.gradients, each) for each in self.partitions]
        """Chunks of the gradients that each device adds up, one after the other."""
        self._updated = [self._cut(storage.parameters, each) for each in owned]

    def _make_private(self, start: Start, devices: Mapping[int, torch.device]) -> None:
        """Allocate unshared parameters and table, on devices by their numbers."""
        storage, (number, device) = self.storage, next(iter(devices.items()))
        if self.is_partitioned:
            # Owners get the first values one parameter at a time, so no memory for all is needed.
            flat = FlatTensors(storage.parameters, device=device, there=False)
            self.trained = {number: flat}
        else:
            self.trained = _new_flats(storage.parameters, start.trained, devices, self.allocator)
        self.other = _new_flats(storage.other, start.other, devices, self.allocator)
        if storage.frozen is not None:
            self.frozen = FrozenMemory(storage, storage.frozen, number, device, self.allocator)
        self.table = ShardTable.private(storage, device)

    def resident(self, device: int) -> list[FlatTensors]:
        """Return the memory of parameters that a device of this process keeps for the whole run."""
        always = [] if self.is_partitioned else [self.trained[device]]
        return [*always, self.other[device]]

    def start_step(self, shares: Shares) -> None:  # noqa: B027 (most send nothing early)
        """Note the shares of a step, before the first `publish`."""

    @abstractmethod
    def publish(self, device: int, slot: int, gradients: Sequence[torch.Tensor | None]) -> None:
        """Adopt the partial sum of one of ``device``'s blocks; never blocks.

        Args:
            device: a device of this process.
            slot: number of the block among those of the device, from the left.
            gradients: one tensor for each trained parameter, in its shape, or None. They belong to
                the exchange until `publish_parameters` returns: it may add to them in place.
        """

    def hold(self, slot: int, gradients: Gradients) -> Gradients:
        """Move a block's sum to the memory that it is sent from, before the last shard is added.

        See `Partial.hold`. Called before `publish_stage`, if `Storage.early` is set.
        """
        raise TypeError("this memory takes whole partial sums; it cannot send stages early")

    def publish_stage(
        self, slot: int, stage: int, gradients: Sequence[torch.Tensor | None]
    ) -> None:
        """Adopt a stage of a partial sum of this process's device, and send it early.

        Called instead of `publish`, once for each stage, if `Storage.early` is set. May raise the
        errors of `collect`.
        """
        raise TypeError("this memory takes whole partial sums; it cannot send stages early")

    @abstractmethod
    def collect(self, shares: Shares, *, partials: bool = True) -> Arrivals | None:
        """Wait until the others' tables and partial sums are visible here, or on their way.

        Args:
            shares: the shares of the step.
            partials: whether partial sums were published.

        Returns:
            The partial sums that may still be on their way; None if all have arrived.
        """

    @abstractmethod
    def partial(self, place: Published) -> PartitionSums:
        """Return a partial sum, as the owner of a partition in this process reads it."""

    def home(self, device: int) -> FlatTensors | None:
        """Return memory for a device's totals, if they cannot stay in the leftmost partial sum."""
        return None

    @abstractmethod
    def publish_parameters(self) -> None:
        """Copy the updated partitions to every device, and wait until they have arrived."""

    @abstractmethod
    def all_gather_gradient(self, whole: FlatTensors) -> None:
        """Gather all gradients in every process; may block as `publish_parameters` does.

        Args:
            whole: memory with the layout of gradients, which holds this process's partitions and is
                complete afterwards.
        """

    def release(self) -> None:
        """Drop the published gradients."""
        for own in self._own.values():
            own.release()

    def make_own(self) -> None:  # noqa: B027 (most have memory of their own anyway)
        """Make this process's parameters private: later writes are not shared.

        Called at the end of the run; the other processes may continue to use the shared memory.
        """

    @abstractmethod
    def broadcast_from_lead(self, buffers: FlatTensors) -> None:
        """Overwrite the parameters and buffers of every process with the lead's.

        Args:
            buffers: buffers of this process's first device; overwritten unless it is the lead.
        """

    def broadcast_tensor_from_lead(self, values: torch.Tensor) -> None:  # noqa: B027 (see there)
        """Overwrite a tensor of every process with the lead's, if `is_partitioned`.

        Collective; may block. If not `is_partitioned`, parameters have the lead's values already.
        """


def write_first(flat: FlatTensors, values: Sequence[torch.Tensor | FirstValues]) -> None:
    """Write the first values to flat memory; values that must still be drawn come last."""
    there = [value if isinstance(value, torch.Tensor) else None for value in values]
    # Drawing needs memory for each tensor, so skip these here and draw them straight into place.
    flat.write(there, skip={number for number, value in enumerate(there) if value is None})
    for view, value in zip(flat.views, values, strict=True):
        if not isinstance(value, torch.Tensor):
            value.write_to(view)


def _new_flats(
    layout: Layout,
    values: Sequence[torch.Tensor | FirstValues],
    devices: Mapping[int, torch.device],
    allocator: TensorAllocator,
) -> dict[int, FlatTensors]:
    """Allocate flat memory on each device; for the CPU, from the allocator.

    Args:
        layout: the layout of the parameters.
        values: the first values, which are written to the memory.
        devices: the devices of this process, by number.
        allocator: allocates memory of the CPU.
    """
    flats = {}
    for number, device in devices.items():
        if device.type == "cpu" and layout.nbytes:
            flats[number] = FlatTensors(layout, memory=allocator.zeros(layout.nbytes))
        else:
            flats[number] = FlatTensors(layout, device=device)
    first, *rest = flats.values()
    write_first(first, values)
    for flat in rest:
        flat.copy_(first)
    return flats
