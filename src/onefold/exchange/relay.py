"""Passes tensors from one device of a line to the next, and back: what stages give each other.

Note: messages that say what they are
-------------------------------------
Shards are of unequal size, and a stage may give anything. So a message says of each of its tensors
the shape, the strides and the dtype: a kernel may choose its way by the strides, and so the bits
depend on them. What lies between the elements of a tensor travels with it.

Note: who waits
---------------
Whoever sends does not wait for the other device to take it. A device of a line has at most as many
shards under way as there are devices from it on, so that is also the most that is underway to it.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch

from onefold.core.flat import aligned
from onefold.core.wire import decode, encode

__all__ = ["LocalRelay", "Message", "Relay", "read_message", "room_of", "write_message"]


@dataclass(frozen=True, slots=True)
class Message:
    """What one device of a line tells another."""

    head: Any
    """Values that `onefold.core.wire` knows."""
    tensors: Sequence[torch.Tensor | None] = ()


class Relay(ABC):
    """Sends messages between neighbours of a line, each pair's in their order."""

    @abstractmethod
    def send(self, device: int, target: int, message: Message) -> None:
        """Send a message from a device of this process; does not wait until it is taken."""

    @abstractmethod
    def receive(self, device: int, source: int) -> Message:
        """Wait for the next message from ``source`` to a device of this process.

        Its tensors lie on the host, in memory of their own.

        Raises:
            PeerError: the other device is lost, has failed, or sent nothing in time.
        """

    def has(self, device: int, source: int) -> bool:
        """Whether `receive` may be called: where one process drives a whole line, the message must
        have been sent before."""
        return True

    @abstractmethod
    def finish(self) -> None:
        """Wait until everything that was sent has left; called at the end of a step."""

    @abstractmethod
    def clear(self) -> None:
        """Forget what is left of a step that failed."""


class LocalRelay(Relay):
    """Between the devices of one process."""

    def __init__(self) -> None:
        self._sent: dict[tuple[int, int], deque[tuple[bytes, torch.Tensor]]] = {}

    def send(self, device: int, target: int, message: Message) -> None:
        head, nbytes = room_of(message)
        room = torch.empty(nbytes, dtype=torch.uint8)
        write_message(message, room)
        self._sent.setdefault((device, target), deque()).append((head, room))

    def receive(self, device: int, source: int) -> Message:
        return read_message(*self._sent[source, device].popleft())

    def has(self, device: int, source: int) -> bool:
        return bool(self._sent.get((source, device)))

    def finish(self) -> None:
        pass  # nothing is on its way

    def clear(self) -> None:
        self._sent.clear()


def room_of(message: Message) -> tuple[bytes, int]:
    """What is said of a message, from which `read_message` reads it, and the bytes of its room."""
    given = [tensor for tensor in message.tensors if tensor is not None]
    rows = [None if tensor is None else _described(tensor) for tensor in message.tensors]
    head = encode([message.head, rows], "what a stage gives")
    return head, sum(aligned(_extent(tensor) * tensor.element_size()) for tensor in given)


def write_message(message: Message, room: torch.Tensor) -> None:
    """Write the tensors of a message into its room, (nbytes,) uint8 on the host."""
    start = 0
    for tensor in message.tensors:
        if tensor is None:
            continue
        count = _extent(tensor)
        stop = start + count * tensor.element_size()
        if count:
            values = tensor.detach().as_strided((count,), (1,))
            room[start:stop].view(tensor.dtype).copy_(values)
        start += aligned(stop - start)


def read_message(head: bytes, room: torch.Tensor) -> Message:
    """Read a message; its tensors are views of the room."""
    value, rows = decode(head)
    tensors: list[torch.Tensor | None] = []
    start = 0
    for row in rows:
        if row is None:
            tensors.append(None)
            continue
        name, shape, stride, count = row
        dtype: torch.dtype = getattr(torch, name)
        nbytes = count * dtype.itemsize
        # No view: what is one may not be written to in place where autograd looks on.
        made = torch.empty(0, dtype=dtype)
        place = (room.storage_offset() + start) // dtype.itemsize
        made.set_(room.untyped_storage(), place, shape, stride) if count else made.resize_(shape)
        tensors.append(made)
        start += aligned(nbytes)
    return Message(value, tensors)


def _described(tensor: torch.Tensor) -> list[Any]:
    name = str(tensor.dtype).removeprefix("torch.")
    return [name, list(tensor.shape), list(tensor.stride()), _extent(tensor)]


def _extent(tensor: torch.Tensor) -> int:
    """Elements from the first to the last one of a tensor, and what lies between them."""
    if not tensor.numel():
        return 0
    pairs = zip(tensor.shape, tensor.stride(), strict=True)
    return 1 + sum((size - 1) * stride for size, stride in pairs)
