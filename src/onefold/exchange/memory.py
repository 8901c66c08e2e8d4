"""Where parameters, frozen or not, partial sums and the board of a run lie.

`Memory` is that of this process's devices. `FrozenMemory` is what one device keeps of the frozen
parameters, where each of several devices keeps a part.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import torch

from onefold.core.flat import FlatTensors, Layout, same_bits, storage_order
from onefold.core.fold import Published
from onefold.core.roster import Roster
from onefold.core.shard import Plan
from onefold.core.stages import StageLayout
from onefold.core.storage import Frozen, Storage
from onefold.exchange.board import Board
from onefold.exchange.spans import Spanned
from onefold.system.heap import ORDINARY, Heap

__all__ = ["Arrivals", "FirstValues", "FrozenMemory", "Memory", "Start", "new_flat", "write_first"]


class FrozenMemory:
    """The frozen parameters of a device: a part of them always, and all of them now and then.

    Pieces have the numbers of `Storage.lent_pieces`.

    Args:
        storage: the sizes.
        frozen: those of frozen parameters in it.
        rank: the device's number.
        device: where it computes.
        heap: where its part lies, if that is other memory.
    """

    def __init__(
        self,
        storage: Storage,
        frozen: Frozen,
        rank: int,
        device: torch.device,
        heap: Heap = ORDINARY,
    ) -> None:
        self._heap = heap
        self.flat = FlatTensors(frozen.layout, device=device, there=False)
        """All of them, now and then."""
        self._first_piece, self._first = len(storage.pieces), len(storage.parameters.entries)
        self._pieces = frozen.pieces
        layout = storage.lent_layout()
        own = frozenset(self._first_piece + number for number in frozen.spans[rank])
        self._own: list[list[int]] = []
        self._begins: list[int] = []
        self._kept: list[torch.Tensor] = []
        for stage, numbers in enumerate(layout.pieces):
            self._add_stage(stage, [n for n in numbers if n in own], layout, device)
        self._layout = layout
        self.stages = sorted(set(frozen.stage_of))
        """Those in which there are any."""
        # Nobody computes with what lies in other memory.
        self._is_all = [
            not heap.apart and len(mine) == sum(number >= self._first_piece for number in numbers)
            for mine, numbers in zip(self._own, layout.pieces, strict=True)
        ]

    def _add_stage(
        self, stage: int, own: list[int], layout: StageLayout, device: torch.device
    ) -> None:
        """Make room for own pieces of a stage, which lie there as in memory for all of it."""
        places = [layout.place(number) for number in own]
        begins = places[0][0] if places else 0
        nbytes = places[-1][0] + places[-1][1] - begins if places else 0
        self._own.append(own)
        self._begins.append(begins)
        if self._heap.apart:
            self._kept.append(self._heap.empty(nbytes))
        else:
            self._kept.append(torch.empty(nbytes, dtype=torch.uint8, device=device))

    @property
    def numbers(self) -> list[int]:
        """Of the pieces that this device keeps."""
        return [number for own in self._own for number in own]

    def entry_of(self, number: int) -> int:
        """The number of a piece's parameter, counted on from the trained ones."""
        return self._pieces[number - self._first_piece].entry + self._first

    def part(self, number: int) -> torch.Tensor:
        """(numel,) a piece that this device keeps, in storage order."""
        stage = self._layout.stages.stage_of[self.entry_of(number)]
        start, nbytes, dtype = self._layout.place(number)
        start -= self._begins[stage]
        return self._kept[stage][start : start + nbytes].view(dtype)

    def keep(self) -> None:
        """Keep what lies in the memory of all of them."""
        for number in self.numbers:
            self.part(number).copy_(self._in_flat(number))

    def adopt_entry(self, entry: int, values: torch.Tensor) -> None:
        """Keep this device's part of a parameter: (numel,) in storage order, on any device."""
        for number in self.numbers:
            piece = self._pieces[number - self._first_piece]
            if piece.entry == entry:
                self.adopt(number, values[piece.start : piece.stop])

    def adopt(self, number: int, values: torch.Tensor) -> None:
        """Keep other values of a piece: (numel,), on any device."""
        self.part(number).copy_(values)

    def has_all_of(self, stage: int) -> bool:
        """Whether all frozen parameters of a stage lie where this device computes.

        Also where there are none, but not if this device's part is in other memory.
        """
        return self._is_all[stage]

    def bytes_before(self, stage: int) -> int:
        """How long memory for a stage is without frozen parameters."""
        own = self._layout.pieces[stage]
        frozen = [number for number in own if number >= self._first_piece]
        return self._layout.place(frozen[0])[0] if frozen else self._layout.stage_bytes[stage]

    def view(self, number: int) -> torch.Tensor:
        """A parameter, counted on from the trained ones, of a stage that this device has all of."""
        stage = self._layout.stages.stage_of[number]
        return self._layout.whole(number, self._kept[stage], begins=self._begins[stage])

    def written(self, stage: int, room: torch.Tensor) -> int | None:
        """Find a parameter that was written to in memory for a stage, by what this device keeps."""
        if self._is_all[stage]:
            return None  # what was written to is what is kept
        changed = (
            number
            for number in self._own[stage]
            if not same_bits(self._layout.in_room(number, room), self.part(number))
        )
        number = next(changed, None)
        return None if number is None else self.entry_of(number)

    def written_in_flat(self) -> int | None:
        """The same, in the memory of all of them."""
        changed = (n for n in self.numbers if not same_bits(self._in_flat(n), self.part(n)))
        number = next(changed, None)
        return None if number is None else self.entry_of(number)

    def _in_flat(self, number: int) -> torch.Tensor:
        piece = self._pieces[number - self._first_piece]
        return storage_order(self.flat.views[piece.entry])[piece.start : piece.stop]


class FirstValues(Protocol):
    """Values of a tensor that are drawn when they are needed."""

    def write_to(self, view: torch.Tensor) -> None:
        """Draw them into a tensor of their shape, on any device."""


@dataclass(frozen=True, slots=True)
class Start:
    """The values that a process starts with; the lead's replace those of all others."""

    trained: Sequence[torch.Tensor | FirstValues]
    """The trained parameters, in the order of the layout."""
    other: Sequence[torch.Tensor | FirstValues]
    """The other parameters."""
    buffers: FlatTensors
    """The module's buffers; overwritten unless this process is the lead."""
    frozen: Sequence[torch.Tensor | FirstValues] = ()
    """The frozen parameters of which each device is to keep a part."""


class Arrivals(Protocol):
    """Partial sums that are still on their way to the owners of spans."""

    def wait_for(self, chunk: int) -> None:
        """Wait until this chunk of this process's span has come from all devices."""

    def finish(self) -> None:
        """Wait until everything is received and sent."""


class Memory(ABC):
    """Memory of this process's devices, and what they can see of that of the others.

    The methods are called in the order of a step: `publish` for each block, `collect`, then
    `partial` for each block and owned span, `hand_on`, `release`. `collect`, `hand_on` and
    `follow_lead` are called on all devices, and may block where other processes take part.
    """

    board: Board
    """Own rows may be written before ``collect``; all rows may be read after it."""
    trained: dict[int, FlatTensors]
    """The trained parameters, by number of this process's devices."""
    other: dict[int, FlatTensors]
    """The other parameters, by number of this process's devices."""
    frozen: FrozenMemory | None = None
    """What this process's device keeps of the frozen parameters, if it does not have all."""
    heap: Heap = ORDINARY
    """Where what is large of this process lies on the host."""
    is_common: bool = False
    """Whether all processes compute with the very same memory of the parameters."""
    is_lent: bool = False
    """Whether each device keeps its span of the trained parameters, and has others brought when it
    needs them: then there is memory for all of them only now and then."""

    @abstractmethod
    def bind(self, roster: Roster) -> None:
        """Adopt a roster: who owns which span. Called between steps, and before the first one."""

    @abstractmethod
    def publish(self, device: int, slot: int, gradients: Sequence[torch.Tensor | None]) -> None:
        """Take over the partial sum of one of ``device``'s blocks; see `Exchange.publish`."""

    @abstractmethod
    def collect(self, plan: Plan) -> Arrivals | None:
        """Wait for the others' boards and partial sums to be visible here, or on their way.

        Returns:
            What may still be on its way; None if all is here.
        """

    @abstractmethod
    def collect_board(self, plan: Plan) -> None:
        """Wait for the others' boards to be visible here, where no partial sums are published."""

    @abstractmethod
    def partial(self, place: Published) -> Spanned:
        """A partial sum, as the owner of a span of this process reads it."""

    def home(self, device: int) -> FlatTensors | None:
        """Where a device's totals go, if they cannot stay where the leftmost partial sum lies."""
        return None

    @abstractmethod
    def hand_on(self) -> None:
        """Bring the updated spans to every device, and wait until they are there."""

    @abstractmethod
    def share_gradient(self, whole: FlatTensors) -> None:
        """Bring the gradient of every span to every process; may block as `hand_on` does.

        Args:
            whole: has the layout of gradients, and holds those of this process's spans; complete
                afterwards.
        """

    @abstractmethod
    def release(self) -> None:
        """Drop the gradients that were published."""

    def make_own(self) -> None:  # noqa: B027 (most have memory of their own anyway)
        """Have what this process sees of the parameters be its own from here on.

        Called at the end; the other processes may go on with what they see.
        """

    @abstractmethod
    def follow_lead(self, buffers: FlatTensors) -> None:
        """Give every process the parameters and buffers of the lead's process.

        Args:
            buffers: those of this process's first device; overwritten unless it is the lead.
        """

    @abstractmethod
    def adopt_lead(self, values: torch.Tensor) -> None:
        """Overwrite a tensor of every process with the lead's, where `is_lent`.

        Called on all devices; may block. Elsewhere all parameters are the lead's from the start.
        """


def write_first(flat: FlatTensors, values: Sequence[torch.Tensor | FirstValues]) -> None:
    """Write the first values to flat memory: what is not drawn yet, one tensor after the other."""
    there = [value if isinstance(value, torch.Tensor) else None for value in values]
    flat.write(there, skip={number for number, value in enumerate(there) if value is None})
    for view, value in zip(flat.views, values, strict=True):
        if not isinstance(value, torch.Tensor):
            value.write_to(view)


def new_flat(layout: Layout, device: torch.device, heap: Heap) -> FlatTensors:
    """Make flat memory of zeros on a device: from the heap, if that is the processor."""
    if device.type == "cpu" and layout.nbytes:
        return FlatTensors(layout, memory=heap.zeros(layout.nbytes))
    return FlatTensors(layout, device=device)
