"""Passes tensors between devices through torch.distributed.

Note: by way of the host
------------------------
Tensors of a GPU are copied to the host and sent from there. Between two neighbours of a line
messages go both ways at one time, which NCCL cannot have without both ends naming them in one order
(it would wait for ever); the host's connections can.
"""

from __future__ import annotations

import torch

from onefold.exchange.collective import GroupTransport
from onefold.exchange.relay import Message, Relay, read_message, room_of, write_message

__all__ = ["GroupRelay"]


class GroupRelay(Relay):
    """The relay of one process of a group.

    Args:
        transport: to the other devices.
    """

    def __init__(self, transport: GroupTransport) -> None:
        self._transport = transport

    def send(self, device: int, target: int, message: Message) -> None:
        head, nbytes = room_of(message)
        room = torch.empty(nbytes, dtype=torch.uint8)
        write_message(message, room)
        sizes = torch.tensor([len(head), nbytes])
        self._transport.begin_sending(target, sizes)
        self._transport.begin_sending(target, torch.frombuffer(bytearray(head), dtype=torch.uint8))
        self._transport.begin_sending(target, room)

    def receive(self, device: int, source: int) -> Message:
        sizes = torch.empty(2, dtype=torch.int64)
        self._transport.receive(source, sizes)
        length, nbytes = sizes.tolist()
        head, room = (torch.empty(n, dtype=torch.uint8) for n in (length, nbytes))
        self._transport.receive(source, head)
        self._transport.receive(source, room)
        return read_message(head.numpy().tobytes(), room)

    def finish(self) -> None:
        self._transport.finish_sending()

    def clear(self) -> None:
        self._transport.finish_sending()
