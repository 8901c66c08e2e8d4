"""What one device keeps of the frozen parameters, where each of several devices keeps a part."""

from __future__ import annotations

import torch

from onefold.core.flat import FlatTensors, same_bits, storage_order
from onefold.core.stages import StageLayout
from onefold.core.storage import Frozen, Storage
from onefold.system.heap import ORDINARY, Heap

__all__ = ["FrozenMemory"]


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
