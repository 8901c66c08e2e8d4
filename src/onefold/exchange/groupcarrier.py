"""Brings gradients to their owners through torch.distributed."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager

import torch

from onefold.core.flat import storage_order
from onefold.core.roster import Roster
from onefold.core.stages import ROOT
from onefold.core.storage import Storage
from onefold.exchange.carrier import DONE, Brought, Carrier, Gift, Want, Word
from onefold.exchange.collective import GroupTransport, Moving, Operation
from onefold.system.heap import Heap

__all__ = ["GroupCarrier", "LineCarrier"]


class GroupCarrier(Carrier):
    """The carrier of one process of a group.

    Args:
        storage: the sizes.
        transport: to the other devices.
        heap: where what comes is kept, if the device is the processor.
        among: the devices that give each other what they have, this one too.
    """

    def __init__(
        self, storage: Storage, transport: GroupTransport, heap: Heap, among: Sequence[int]
    ) -> None:
        super().__init__(storage)
        self._heap = heap
        self._transport = transport
        self._among = among
        # Not all begin with the same one.
        self._peers = [peer for peer in transport.peers() if peer in among]
        self._underway: list[Moving] = []
        """Parameters that were wanted ahead of their use, here or elsewhere."""

    def bind(self, roster: Roster) -> None:
        spans = [frozenset(span) for span in roster.spans]
        self._owned = [
            [[n for n in numbers if n in span] for numbers in self.layout.pieces] for span in spans
        ]
        # Frozen parameters with them.
        kept = map(frozenset, self.storage.kept(roster.spans))
        self._kept = [
            [[n for n in numbers if n in own] for numbers in self.lent.pieces] for own in kept
        ]

    def carry(self, gift: Gift | Want | None) -> list[Brought]:
        transport = self._transport
        word = DONE if gift is None else gift.word
        packed = word.packed(max(self.sizes, default=0))
        words = {
            rank: Word.read(each, self.sizes)
            for rank, each in zip(
                self._among, transport.meet_among(self._among, packed), strict=True
            )
        }
        # For each pair of devices, what one end sends is listed as the other lists its receipts.
        at_once: list[Operation] = []
        ahead: list[Operation] = []
        coming = {}
        for peer in self._peers:
            coming[peer] = self._rooms(words[peer])
            at_once += [Operation(True, peer, part) for part in self._given(gift, peer)]
            at_once += [Operation(False, peer, room) for room in coming[peer].values()]
            asked = ahead if words[peer].is_ahead else at_once
            asked += [Operation(True, peer, part) for part in self._asked(words[peer])]
            awaited = ahead if word.is_ahead else at_once
            awaited += [Operation(False, peer, room) for room in self._awaited(gift, peer)]
        # In one order everywhere, and begun before anything is waited for.
        moving = [transport.move(operations) for operations in (at_once, ahead)]
        if ahead:
            self._underway.append(moving[1])
        if isinstance(gift, Want):
            self.fill(gift, self.kept(gift.stage))
        if isinstance(gift, Want) and not gift.ahead:
            moving[0].finish()
        return [
            self._brought(rank, each, gift, coming)._replace(arrive=moving[0].finish)
            for rank, each in words.items()
        ]

    def await_rooms(self) -> None:
        while self._underway:
            self._underway.pop(0).finish()

    def has_all_of(self, stage: int) -> bool:
        """Whether a stage has parameters, and all of them are this process's."""
        return len(self.kept(stage)) == len(self.lent.pieces[stage]) > 0

    def kept(self, stage: int) -> list[int]:
        """The pieces of a stage that are this process's, frozen ones with them."""
        return self._kept[self._transport.rank][stage]

    def _given(self, gift: Gift | Want | None, peer: int) -> list[torch.Tensor]:
        """What a device is sent of a gift."""
        if not isinstance(gift, Gift):
            return []
        own = self.own_pieces(gift, self._owned[peer][gift.stage])
        return [storage_order(piece) for piece in own.values()]

    def _asked(self, word: Word) -> list[torch.Tensor]:
        """What a device wants that is this one's."""
        if not word.is_want:
            return []
        device = self._transport.device
        return [self._values(number).to(device) for number in self.kept(word.stage)]

    def _awaited(self, gift: Gift | Want | None, peer: int) -> list[torch.Tensor]:
        """Where what a device has of the parameters that this one wants is to lie."""
        if not isinstance(gift, Want):
            return []
        return [self.lent.in_room(number, gift.room) for number in self._kept[peer][gift.stage]]

    def _brought(
        self,
        rank: int,
        word: Word,
        gift: Gift | Want | None,
        coming: Mapping[int, Mapping[int, torch.Tensor]],
    ) -> Brought:
        if not word.is_gift:
            return Brought(word, {}, False)
        if rank == self._transport.rank and isinstance(gift, Gift):
            own = self._owned[rank][word.stage]
            # Lent: kept, these views would keep all of the gradients they are a part of.
            lent = len(own) < len(self.layout.pieces[word.stage])
            return Brought(word, self.own_pieces(gift, own), lent)
        pieces = {number: self.shaped(room, number) for number, room in coming[rank].items()}
        return Brought(word, pieces, False)

    def _rooms(self, word: Word) -> dict[int, torch.Tensor]:
        """Make room for what a device sends: (numel,) for each of this process's pieces."""
        if not word.is_gift:
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


class LineCarrier(Carrier):
    """The carrier of one process in lines of devices.

    In a step, only those devices hear each other that compute the same stages; see `in_line`.

    Args:
        everybody: between all devices.
        column: between those that compute the same.
    """

    def __init__(self, everybody: GroupCarrier, column: GroupCarrier) -> None:
        super().__init__(everybody.storage)
        self._everybody, self._column = everybody, column
        self._now = everybody

    def bind(self, roster: Roster) -> None:
        self._everybody.bind(roster)
        self._column.bind(roster)

    def await_rooms(self) -> None:
        self._everybody.await_rooms()
        self._column.await_rooms()

    def lend(self, values: Callable[[int], torch.Tensor]) -> None:
        self._everybody.lend(values)
        self._column.lend(values)

    @contextmanager
    def in_line(self) -> Iterator[None]:
        self._now = self._column
        try:
            yield
        finally:
            self._now = self._everybody

    def carry(self, gift: Gift | Want | None) -> list[Brought]:
        if (
            isinstance(gift, Want)
            and self._now is self._everybody
            # What lies in no stage all devices want, and so its owner takes part as well.
            and gift.stage != ROOT
            and self._everybody.has_all_of(gift.stage)
        ):
            self._everybody.fill(gift, self._everybody.kept(gift.stage))
            return []
        return self._now.carry(gift)
