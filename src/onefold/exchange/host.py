"""Reaches the other processes of a host: words through sockets, bytes through shared files.

Note: who may write to a room
-----------------------------
`bring` copies nothing: the lead maps the very memory that each process has filled, and may read it
as long as it keeps the tensors. So nobody fills its room again before the lead is done with it;
`onefold.checkpoint.resume` waits for the writing of a checkpoint before it packs the next one.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence

import torch

from onefold.exchange.commonfile import new_file, take_file
from onefold.exchange.mailbox import Mailbox
from onefold.exchange.transport import Transport
from onefold.system.heap import ORDINARY, Heap

__all__ = ["HostTransport"]


class HostTransport(Transport):
    """One process of several on this host.

    Args:
        mailbox: connects the processes; closed with this transport.
        heap: where its `room` lies, and what it hands out.
    """

    def __init__(self, mailbox: Mailbox, heap: Heap = ORDINARY) -> None:
        self.mailbox = mailbox
        self._heap = heap
        self._room: tuple[int, torch.Tensor] | None = None

    def begin_step(self, step: int) -> None:
        self.step = self.mailbox.step = step

    def meet(self, word: bytes = b"") -> Sequence[bytes]:
        return self.mailbox.meet(word)

    def meet_among(self, devices: Sequence[int], word: bytes) -> Sequence[bytes]:
        """As `meet`, of some devices alone, which are named in ascending order."""
        return self.mailbox.meet(word, devices)

    def room(self, nbytes: int) -> torch.Tensor:
        # A larger room is a new file; the lead may still have the old one mapped.
        if self._room is None or self._room[1].numel() < nbytes:
            self._drop_room()
            self._room = new_file(nbytes, self._heap)
        return self._room[1]

    def bring(self) -> list[torch.Tensor]:
        if self._room is None:
            raise ValueError("there is nothing to bring: fill a room first")
        descriptor, memory = self._room
        mailbox = self.mailbox
        if mailbox.rank != 0:
            mailbox.send_file(0, descriptor)
            return []
        return [memory, *(take_file(mailbox, peer) for peer in range(1, mailbox.size))]

    def hand_out(self, make: Callable[[int], torch.Tensor] | None) -> torch.Tensor:
        if make is None:
            return take_file(self.mailbox, 0)
        for peer in range(1, self.mailbox.size):
            made = make(peer)
            descriptor, memory = new_file(made.numel(), self._heap)
            # Written before it is sent, as receiving it is all that the peer waits for.
            memory[: made.numel()] = made
            # Closed at once: the message holds the file until the peer has received it.
            try:
                self.mailbox.send_file(peer, descriptor)
            finally:
                os.close(descriptor)
        return make(0)

    def close(self, failure: BaseException | None = None) -> None:
        # The reason first: once the sockets are closed nobody can be told.
        if failure is not None:
            self.mailbox.tell_failure(failure)
        else:
            self.mailbox.tell_end()
        self.mailbox.close()
        self._drop_room()

    def _drop_room(self) -> None:
        if self._room is not None:
            os.close(self._room[0])
            self._room = None
