"""Brings the gradients of one stage of one shard from the device that computed them to the owners.

Note: one event after the other
-------------------------------
Devices compute their shards at the same time, and each finishes its stages when it does, perhaps in
another order than the others, or not all of them. So nothing is taken for granted but this: whoever
has gradients of a stage, whoever needs the parameters of one that others keep, and whoever is done
with its shard, makes the same call, `StageExchange.exchange`, and describes in a header what it
sends or requests. All calls that meet are one *event*. Then everybody knows what is on its way from
whom to whom, and a round of shards is over when all report that they are done.
"""

from __future__ import annotations

import struct
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import NamedTuple

import torch

from onefold.core.assignment import Assignment
from onefold.core.storage import Storage
from onefold.exchange.memory import by_stage, cut_segment, shape_segment
from onefold.exchange.transport import Transport

__all__ = [
    "DONE",
    "Delivery",
    "GradientSend",
    "LocalStageExchange",
    "ParameterRequest",
    "StageExchange",
]

_HEAD = struct.Struct("<iiB")
_DONE, _REQUESTS, _PREFETCHES = -1, -2, -3


class Header(NamedTuple):
    """What a device announces in an event."""

    shard: int
    """-1 if the device is done with its shard; -2 if it requests the stage, and -3 if it prefetches
    it."""
    stage: int
    last: bool
    """Whether nothing more comes of this stage of this shard."""
    gave: tuple[bool, ...]
    """For each parameter of the stage, whether there is a gradient."""

    @property
    def is_send(self) -> bool:
        """Whether the device sends gradients."""
        return self.shard >= 0

    @property
    def is_request(self) -> bool:
        """Whether the device requests the parameters of the stage."""
        return self.shard in (_REQUESTS, _PREFETCHES)

    @property
    def is_ahead(self) -> bool:
        """Whether the device goes on without these parameters until it needs them."""
        return self.shard == _PREFETCHES

    def packed(self, parameters: int) -> bytes:
        """Pack the header into bytes, of one length for up to so many parameters."""
        flags = sum(1 << place for place, gave in enumerate(self.gave) if gave)
        head = _HEAD.pack(self.shard, self.stage, self.last)
        return head + flags.to_bytes(-(-parameters // 8), "little")

    @classmethod
    def read(cls, packed: bytes, sizes: Sequence[int]) -> Header:
        """Read what `packed` wrote, where stages have so many parameters."""
        shard, stage, last = _HEAD.unpack_from(packed)
        flags = int.from_bytes(packed[_HEAD.size :], "little")
        count = sizes[stage] if shard >= 0 else 0
        return cls(shard, stage, bool(last), tuple(bool(flags >> n & 1) for n in range(count)))


DONE = Header(_DONE, 0, True, ())
"""The header of a device that is done with its shard."""


@dataclass(frozen=True, slots=True)
class GradientSend:
    """Gradients of one stage, from a shard or from a microbatch of it."""

    shard: int
    stage: int
    last: bool
    """Whether nothing more comes of this stage of this shard."""
    gradients: Sequence[torch.Tensor | None]
    """One for each parameter of the stage, shaped like it; None where the shard gave none."""

    @property
    def header(self) -> Header:
        """What announces it."""
        gave = tuple(gradient is not None for gradient in self.gradients)
        return Header(self.shard, self.stage, self.last, gave)


@dataclass(frozen=True, slots=True)
class ParameterRequest:
    """A request for all parameters of one stage, as the owners of its segments have them."""

    stage: int
    buffer: torch.Tensor
    """(bytes,) uint8 on this device, where they are to lie: as `StageLayout.place` returns. It may
    end where the trained ones do, if this device keeps all frozen ones of the stage."""
    ahead: bool = False
    """Whether they may still be on their way until `StageExchange.await_prefetched`."""

    @property
    def header(self) -> Header:
        """What announces it."""
        return Header(_PREFETCHES if self.ahead else _REQUESTS, self.stage, True, ())


StageMessage = GradientSend | ParameterRequest | None
"""What a device contributes to an event; None if it is done with its shard."""


class Delivery(NamedTuple):
    """What a device has sent in an event."""

    header: Header
    segments: Mapping[int, torch.Tensor] = {}
    """Those that are for this process, by their numbers, each shaped as the segment; those of
    parameters without a gradient are missing."""
    shared: bool = False
    """Whether they must be copied, or used up, before the next event, if they are not late."""
    arrive: Callable[[], None] | None = None
    """Waits for the segments, if they are late: still on their way when the event is over."""


class StageExchange(ABC):
    """Brings gradients to the owners of their segments.

    Args:
        storage: the sizes; its model has stages.
        assignment: who owns what.
        rank: number of this process's first device.
    """

    prefetches = False
    """Whether parameters that are requested ahead of their use come while others are used."""

    def __init__(self, storage: Storage, assignment: Assignment, rank: int = 0) -> None:
        self.storage, self.rank = storage, rank
        self.layout = storage.stage_layout()
        self.partitioned_layout = storage.partitioned_layout()
        """Where parameters of a stage lie in a buffer for it."""
        entries = self.layout.stages.entries
        self._places = {number: n for numbers in entries for n, number in enumerate(numbers)}
        self._sizes = [len(numbers) for numbers in entries]
        self._values: Callable[[int], torch.Tensor]
        self.owned = [by_stage(self.layout, each) for each in assignment.partitions]
        """For each device and stage, the segments whose gradients are for it."""

    def serve(self, values: Callable[[int], torch.Tensor]) -> None:
        """Set how the parameters that this device owns are found.

        Args:
            values: given the number of a segment, frozen ones counted on from the trained ones,
                returns (numel,) in storage order, in the dtype in which models compute.
        """
        self._values = values

    def in_pipeline(self) -> AbstractContextManager[None]:
        """Surround the shards of a step that go through pipelines."""
        return nullcontext()

    @abstractmethod
    def exchange(self, call: StageMessage) -> list[Delivery]:
        """Send gradients, request parameters, or report the end; return what all have sent.

        May block, and raise `PeerError`, where other processes take part. Nobody requests
        parameters where every device has all of them.
        """

    def await_prefetched(self) -> None:  # noqa: B027 (most have nothing on its way)
        """Wait until what was prefetched is here, and what others requested has left."""

    def _all_gather_headers(
        self, transport: Transport, among: Sequence[int], call: StageMessage
    ) -> dict[int, Header]:
        """Announce what this device contributes; what all do, by their numbers."""
        packed = (DONE if call is None else call.header).packed(max(self._sizes, default=0))
        found = transport.all_gather_bytes(packed, among)
        pairs = zip(among, found, strict=True)
        return {rank: Header.read(each, self._sizes) for rank, each in pairs}

    def _given(self, header: Header) -> list[int]:
        """The segments of this process for which a device has a gradient."""
        if not header.is_send:
            return []
        segments = self.storage.segments
        own = self.owned[self.rank][header.stage]
        return [number for number in own if header.gave[self._places[segments[number].entry]]]

    def _own_segments(self, send: GradientSend, owner: int) -> dict[int, torch.Tensor]:
        """Views of what a device owns of gradients: entries in their shape, else (numel,)."""
        found = {}
        for number in self.owned[owner][send.stage]:
            segment = self.storage.segments[number]
            gradient = send.gradients[self._places[segment.entry]]
            if gradient is not None:
                entry = self.storage.gradients.entries[segment.entry]
                found[number] = cut_segment(gradient, segment, entry)
        return found

    def _own_delivery(self, send: GradientSend) -> Delivery:
        own = self._own_segments(send, self.rank)
        # Shared: kept, these views would keep all of the gradients that they are a part of.
        shared = len(self.owned[self.rank][send.stage]) < len(self.layout.segments[send.stage])
        return Delivery(send.header, own, shared)

    def _shaped(self, flat: torch.Tensor, number: int) -> torch.Tensor:
        """A view of (numel,) elements in storage order that is shaped as the segment."""
        segment = self.storage.segments[number]
        return shape_segment(flat, segment, self.storage.gradients.entries[segment.entry])

    def _fill(self, request: ParameterRequest, kept: Iterable[tuple[int, torch.Tensor]]) -> None:
        """Copy segments of a stage, by number, to where they are requested."""
        for number, values in kept:
            place = self.partitioned_layout.in_room(number, request.buffer)
            # What has no place there is at hand, where it is kept.
            if place.numel():
                place.copy_(values)

    def _numbered(self, numbers: Iterable[int]) -> Iterator[tuple[int, torch.Tensor]]:
        """Yield segments that this process keeps, one by one: each may be converted for this."""
        return ((number, self._values(number)) for number in numbers)


class LocalStageExchange(StageExchange):
    """Where one process drives all devices, gradients and parameters are there at once.

    Args:
        storage: the sizes.
        assignment: who owns what.
        copies: whether gradients are to be copied, as sums are kept elsewhere than they lie.
    """

    def __init__(self, storage: Storage, assignment: Assignment, *, copies: bool = False) -> None:
        super().__init__(storage, assignment)
        self._devices, self._copies = assignment.devices, copies

    def exchange(self, call: StageMessage) -> list[Delivery]:
        if call is None:
            return [Delivery(DONE)]
        if isinstance(call, ParameterRequest):
            self._fill(call, self._numbered(self.partitioned_layout.segments[call.stage]))
            return [Delivery(call.header)]
        # The gradients are nobody else's, so they may take sums.
        at_home = {
            number: segment.to(device, non_blocking=True)
            for owner, device in enumerate(self._devices)
            for number, segment in self._own_segments(call, owner).items()
        }
        return [Delivery(call.header, at_home, self._copies)]
