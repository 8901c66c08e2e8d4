"""Brings gradients to their owners through memory that the processes of a host share.

Note: two boxes for each device
-------------------------------
A device copies what is for others into a box in shared memory, and the owners read it there after
the meeting of the event. It writes into its other box in the next event, so nobody has to wait
until all have read: by the time it comes back to the first box there has been another meeting,
which the owners entered when they were done with reading.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from onefold.core.flat import storage_order
from onefold.core.roster import Roster
from onefold.core.storage import Storage
from onefold.exchange.carrier import DONE, Brought, Carrier, Gift, Want, Word
from onefold.exchange.host import HostTransport
from onefold.system.compat import copy_each

__all__ = ["HostCarrier"]


class HostCarrier(Carrier):
    """The carrier of one process of several on a host.

    Args:
        storage: the sizes.
        transport: connects the processes.
        boxes: two for each device, each (nbytes of the largest stage,) uint8, the same memory in
            all processes.
        among: the devices that give each other what they have computed, this one too.
    """

    def __init__(
        self,
        storage: Storage,
        transport: HostTransport,
        boxes: Sequence[Sequence[torch.Tensor]],
        among: Sequence[int],
    ) -> None:
        super().__init__(storage)
        self._transport = transport
        self._among = among
        self._boxes = boxes
        self._rank = transport.mailbox.rank
        self._turn = 0

    def bind(self, roster: Roster) -> None:
        own = frozenset(roster.spans[self._rank])
        self._mine = [[n for n in numbers if n in own] for numbers in self.layout.pieces]
        self._others = [[n for n in numbers if n not in own] for numbers in self.layout.pieces]

    def carry(self, gift: Gift | Want | None) -> list[Brought]:
        if isinstance(gift, Gift):
            leaving = self.own_pieces(gift, self._others[gift.stage])
            if leaving:
                targets = [self._in_box(self._rank, number) for number in leaving]
                copy_each(targets, [storage_order(piece) for piece in leaving.values()])
        word = DONE if gift is None else gift.word
        words = self._transport.meet_among(self._among, word.packed(max(self.sizes)))
        pairs = zip(self._among, words, strict=True)
        brought = [self._read(rank, each, gift) for rank, each in pairs]
        self._turn = 1 - self._turn
        return brought

    def await_rooms(self) -> None:
        pass  # in shared memory all parameters are there

    def _read(self, rank: int, packed: bytes, gift: Gift | Want | None) -> Brought:
        word = Word.read(packed, self.sizes)
        if not word.is_gift:
            return Brought(word, {}, False)
        mine = self._mine[word.stage]
        if rank == self._rank and isinstance(gift, Gift):
            # Lent: kept, these views would keep all of the gradients that they are a part of.
            return Brought(word, self.own_pieces(gift, mine), True)
        there = [number for number in mine if self.gave(word, number)]
        pieces = {number: self.shaped(self._in_box(rank, number), number) for number in there}
        return Brought(word, pieces, True)

    def _in_box(self, rank: int, number: int) -> torch.Tensor:
        """Where a piece lies in a device's box of this event: (numel,)."""
        return self.layout.in_room(number, self._boxes[rank][self._turn])
