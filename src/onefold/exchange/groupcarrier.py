"""Brings gradients to their owners through torch.distributed."""

from __future__ import annotations

import torch

from onefold.core.flat import storage_order
from onefold.core.roster import Roster
from onefold.core.storage import Storage
from onefold.exchange.carrier import DONE, Brought, Carrier, Gift, Word
from onefold.exchange.collective import GroupTransport, Operation
from onefold.system.heap import Heap

__all__ = ["GroupCarrier"]


class GroupCarrier(Carrier):
    """The carrier of one process of a group.

    Args:
        storage: the sizes.
        transport: to the other devices.
        heap: where what comes is kept, if the device is the processor.
    """

    def __init__(self, storage: Storage, transport: GroupTransport, heap: Heap) -> None:
        super().__init__(storage)
        self._heap = heap
        self._transport = transport

    def bind(self, roster: Roster) -> None:
        spans = [frozenset(span) for span in roster.spans]
        self._owned = [
            [[n for n in numbers if n in span] for numbers in self.layout.pieces] for span in spans
        ]

    def carry(self, gift: Gift | None) -> list[Brought]:
        transport = self._transport
        word = DONE if gift is None else gift.word
        words = [
            Word.read(each, self.sizes)
            for each in transport.meet(word.packed(max(self.sizes, default=0)))
        ]
        # For each pair of devices, what one end sends is listed as the other lists its receipts.
        operations, coming = [], {}
        for peer in transport.peers():
            if gift is not None:
                leaving = self.own_pieces(gift, self._owned[peer][gift.stage])
                operations += [
                    Operation(True, peer, storage_order(piece)) for piece in leaving.values()
                ]
            coming[peer] = self._rooms(words[peer])
            operations += [Operation(False, peer, room) for room in coming[peer].values()]
        transport.move(operations).finish()
        brought = []
        for rank, each in enumerate(words):
            if each.shard < 0:
                brought.append(Brought(each, {}, False))
            elif gift is not None and rank == transport.rank:
                # Lent: kept, these views would keep all of the gradients they are a part of.
                mine = self._owned[rank][each.stage]
                brought.append(Brought(each, self.own_pieces(gift, mine), True))
            else:
                pieces = {
                    number: self.shaped(room, number) for number, room in coming[rank].items()
                }
                brought.append(Brought(each, pieces, False))
        return brought

    def _rooms(self, word: Word) -> dict[int, torch.Tensor]:
        """Make room for what a device sends: (numel,) for each of this process's pieces."""
        if word.shard < 0:
            return {}
        rooms = {}
        for number in self._owned[self._transport.rank][word.stage]:
            if self.gave(word, number):
                _, nbytes, dtype = self.layout.place(number)
                rooms[number] = self._room(nbytes, dtype)
        return rooms

    def _room(self, nbytes: int, dtype: torch.dtype) -> torch.Tensor:
        device = self._transport.device
        if device.type == "cpu":
            return self._heap.empty(nbytes).view(dtype)
        return torch.empty(nbytes // dtype.itemsize, dtype=dtype, device=device)
