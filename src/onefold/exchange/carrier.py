"""Brings the gradients of one stage of one shard from the device that computed them to the owners.

Note: one event after the other
-------------------------------
Devices compute their shards at the same time, and each finishes its stages when it does, perhaps in
another order than the others, or not all of them. So nothing is taken for granted but this: whoever
has gradients of a stage, whoever needs the parameters of one that others keep, and whoever is done
with its shard, makes the same call, `Carrier.carry`, and says in a word what it brings or wants.
All calls that meet are one *event*. Then everybody knows what is on its way from whom to whom, and
a round of shards is over when all say that they are done.
"""

from __future__ import annotations

import struct
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import NamedTuple

import torch

from onefold.core.flat import laid_out, storage_order
from onefold.core.roster import Roster
from onefold.core.storage import Storage

__all__ = ["DONE", "AtOnce", "Brought", "Carrier", "Gift", "Want", "Word"]

_HEAD = struct.Struct("<iiB")
_DONE, _WANTS, _WANTS_AHEAD = -1, -2, -3


class Word(NamedTuple):
    """What a device says of what it brings to an event."""

    shard: int
    """-1 if the device brings nothing, as it is done with its shard; -2 if it wants the stage, and
    -3 if it wants the stage later."""
    stage: int
    last: bool
    """Whether nothing more comes of this stage of this shard."""
    gave: tuple[bool, ...]
    """For each parameter of the stage, whether there is a gradient."""

    @property
    def is_gift(self) -> bool:
        """Whether the device brings gradients."""
        return self.shard >= 0

    @property
    def is_want(self) -> bool:
        """Whether the device wants the parameters of the stage."""
        return self.shard in (_WANTS, _WANTS_AHEAD)

    @property
    def is_ahead(self) -> bool:
        """Whether the device goes on without the parameters that it wants, until it needs them."""
        return self.shard == _WANTS_AHEAD

    def packed(self, parameters: int) -> bytes:
        """Pack the word into bytes, of one length for up to so many parameters."""
        flags = sum(1 << place for place, gave in enumerate(self.gave) if gave)
        head = _HEAD.pack(self.shard, self.stage, self.last)
        return head + flags.to_bytes(-(-parameters // 8), "little")

    @classmethod
    def read(cls, word: bytes, sizes: Sequence[int]) -> Word:
        """Read what `packed` wrote, where stages have so many parameters."""
        shard, stage, last = _HEAD.unpack_from(word)
        flags = int.from_bytes(word[_HEAD.size :], "little")
        count = sizes[stage] if shard >= 0 else 0
        return cls(shard, stage, bool(last), tuple(bool(flags >> n & 1) for n in range(count)))


DONE = Word(_DONE, 0, True, ())
"""What a device says that is done with its shard."""


@dataclass(frozen=True, slots=True)
class Gift:
    """The gradients of one stage, of a shard or of a piece of one."""

    shard: int
    stage: int
    last: bool
    """Whether nothing more comes of this stage of this shard."""
    gradients: Sequence[torch.Tensor | None]
    """One for each parameter of the stage, shaped like it; None where the shard gave none."""

    @property
    def word(self) -> Word:
        """What is said of it."""
        gave = tuple(gradient is not None for gradient in self.gradients)
        return Word(self.shard, self.stage, self.last, gave)


@dataclass(frozen=True, slots=True)
class Want:
    """A wish for all parameters of one stage, as the owners of its pieces have them."""

    stage: int
    room: torch.Tensor
    """(bytes,) uint8 on this device, where they are to lie: as `StageLayout.place` says. It may
    end where the trained ones do, if this device keeps all frozen ones of the stage."""
    ahead: bool = False
    """Whether they may still be on their way until `Carrier.await_rooms`."""

    @property
    def word(self) -> Word:
        """What is said of it."""
        return Word(_WANTS_AHEAD if self.ahead else _WANTS, self.stage, True, ())


class Brought(NamedTuple):
    """What a device has brought to an event."""

    word: Word
    pieces: Mapping[int, torch.Tensor]
    """Those that are for this process, by their numbers, each shaped as the piece; those of
    parameters without a gradient are missing."""
    lent: bool
    """Whether they must be copied, or used up, before the next event, if they are not late."""
    arrive: Callable[[], None] | None = None
    """Waits for the pieces, if they are late: still on their way when the event is over."""


class Carrier(ABC):
    """Brings gradients to the owners of their pieces.

    Args:
        storage: the sizes; its model has stages.
    """

    def __init__(self, storage: Storage) -> None:
        self.storage = storage
        self.layout = storage.stage_layout()
        entries = self.layout.stages.entries
        self._places = {number: n for numbers in entries for n, number in enumerate(numbers)}
        self.sizes = [len(numbers) for numbers in entries]
        """How many parameters each stage has."""
        self._values: Callable[[int], torch.Tensor]
        self.lent = storage.lent_layout()
        """Where parameters of a stage lie in a room for it."""

    @abstractmethod
    def bind(self, roster: Roster) -> None:
        """Adopt a roster: who owns what. Called between steps, and before the first one."""

    def lend(self, values: Callable[[int], torch.Tensor]) -> None:
        """Say how what this device owns of the parameters is found.

        Args:
            values: given the number of a piece, frozen ones counted on from the trained ones,
                returns (numel,) in storage order, in the dtype in which models compute.
        """
        self._values = values

    def in_line(self) -> AbstractContextManager[None]:
        """Surround the shards of a step that go through lines of devices."""
        return nullcontext()

    @abstractmethod
    def carry(self, gift: Gift | Want | None) -> list[Brought]:
        """Bring a gift, fill a room, or say that this device is done; return what all have brought.

        May block, and raise `PeerError`, where other processes take part. Nobody asks for rooms to
        be filled where every device has all parameters.
        """

    @property
    def brings_ahead(self) -> bool:
        """Whether parameters that are wanted ahead of their use come while others are used."""
        return True

    @abstractmethod
    def await_rooms(self) -> None:
        """Wait until what was wanted ahead of its use is there, and what others wanted has left."""

    def fill(self, want: Want, numbers: Sequence[int]) -> None:
        """Copy pieces of a stage that this process keeps to where they are wanted."""
        for number in numbers:
            place = self.lent.in_room(number, want.room)
            # What there is no room for is at hand, where it is kept.
            if place.numel():
                place.copy_(self._values(number))

    def gave(self, word: Word, number: int) -> bool:
        """Whether there is a gradient for the piece of this number, of the stage of the word."""
        return word.gave[self._places[self.storage.pieces[number].entry]]

    def piece(self, gift: Gift, number: int) -> torch.Tensor | None:
        """A view of a piece of a gift: in the entry's shape if it is whole, else (numel,)."""
        piece = self.storage.pieces[number]
        gradient = gift.gradients[self._places[piece.entry]]
        if gradient is None:
            return None
        laid = laid_out(gradient, self.storage.gradients.entries[piece.entry].stride)
        return laid if piece.whole else storage_order(laid)[piece.start : piece.stop]

    def shaped(self, flat: torch.Tensor, number: int) -> torch.Tensor:
        """A view of (numel,) elements in storage order that is shaped as the piece."""
        piece = self.storage.pieces[number]
        entry = self.storage.gradients.entries[piece.entry]
        return flat.as_strided(entry.shape, entry.stride) if piece.whole else flat

    def own_pieces(self, gift: Gift, numbers: Sequence[int]) -> dict[int, torch.Tensor]:
        """Views of those pieces of a gift that have a gradient."""
        found = {number: self.piece(gift, number) for number in numbers}
        return {number: piece for number, piece in found.items() if piece is not None}


class AtOnce(Carrier):
    """Where one process drives all devices, each gift is there at once, and so are parameters.

    Args:
        storage: the sizes.
        lends: whether gradients are to be copied, as sums are kept elsewhere than they lie.
    """

    def __init__(self, storage: Storage, *, lends: bool = False) -> None:
        super().__init__(storage)
        self._lends = lends

    def bind(self, roster: Roster) -> None:
        self._homes = {n: roster.devices[d] for d, span in enumerate(roster.spans) for n in span}

    def carry(self, gift: Gift | Want | None) -> list[Brought]:
        if isinstance(gift, Want):
            self.fill(gift, self.lent.pieces[gift.stage])
            return [Brought(gift.word, {}, False)]
        if gift is None:
            return [Brought(DONE, {}, False)]
        pieces = self.own_pieces(gift, self.layout.pieces[gift.stage])
        # The gradients are nobody else's, so they may take sums.
        at_home = {n: piece.to(self._homes[n], non_blocking=True) for n, piece in pieces.items()}
        return [Brought(gift.word, at_home, self._lends)]

    @property
    def brings_ahead(self) -> bool:
        return False

    def await_rooms(self) -> None:
        pass  # nothing is on its way
