"""How processes reach each other: short messages, numbers, bytes, and tensors of a pipeline.

A `Transport` knows nothing of steps, parameters or gradients. Every process makes the same calls in
the same order. Each call may block, for the transport's limit at most, and raises `PeerError` when
another device is lost, has failed, or does not make it.

Note: messages of a pipeline describe themselves
------------------------------------------------
Shards are of unequal size, and a stage may return anything. So a message describes the shape, the
strides and the dtype of each of its tensors: a kernel may choose its way by the strides, and so the
bits depend on them. What lies between the elements of a tensor travels with it.

Note: who waits in a pipeline
-----------------------------
The sender does not wait for the receiver. A device of a pipeline has at most as many shards under
way as there are devices from it on, so no more messages than that are under way to it.
"""

from __future__ import annotations

import struct
from abc import ABC, abstractmethod
from collections import defaultdict, deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import msgspec
import torch

from onefold.core.encoding import decode, encode
from onefold.core.flat import aligned
from onefold.errors import DisagreementError, OnefoldError, PeerFailed
from onefold.system.allocator import DEFAULT_ALLOCATOR, TensorAllocator
from onefold.system.words import message_of, words_of_failure

__all__ = [
    "Failure",
    "LocalTransport",
    "Message",
    "Ranks",
    "Transport",
    "has_left",
    "head_of",
    "host_buffer",
    "packed_message",
    "read_message",
    "write_message",
]


Ranks = Sequence[int] | None
"""Some devices, in ascending order; None for all."""


def has_left(failure: str) -> OnefoldError:
    """The error of a transport that has been closed.

    Args:
        failure: what it was closed for; empty if the script did so.
    """
    why = f"because this device {failure}" if failure else "closed by the script"
    return OnefoldError(
        f"this trainer has left its run, {why}, and the other devices go on without it: make a "
        f"new run"
    )


class Failure(msgspec.Struct, frozen=True):
    """Why a device has failed, as it tells the others."""

    device: int
    step: int
    words: str
    disagreement: str = ""
    """The message of a `DisagreementError`, which all devices raise alike; else empty."""

    @classmethod
    def of(cls, failure: BaseException, *, device: int, step: int) -> Failure:
        """Describe a device's own failure."""
        alike = message_of(failure) if isinstance(failure, DisagreementError) else ""
        return cls(device, step, words_of_failure(failure, step), alike)

    def error(self) -> DisagreementError | PeerFailed:
        """The error of a device that is told of it."""
        if self.disagreement:
            return DisagreementError(self.disagreement)
        return PeerFailed(f"device {self.device} {self.words}", device=self.device, step=self.step)


class Transport(ABC):
    """Reaches the other processes of a run.

    Args:
        device: the first device of this process.
        allocator: where its `buffer` lies, and what of the model lies on the host.
    """

    step = 1
    """The step that the run is at, for error messages."""
    frame_bytes = 32 * 1024
    """The longest message that ``all_gather_bytes`` accepts."""

    def __init__(
        self, device: torch.device, allocator: TensorAllocator = DEFAULT_ALLOCATOR
    ) -> None:
        self.device, self.allocator = device, allocator
        self._buffer: torch.Tensor | None = None

    def begin_step(self, step: int) -> None:
        """Note which step the run is at, for error messages."""
        self.step = step

    @abstractmethod
    def all_gather_bytes(self, message: bytes = b"", among: Ranks = None) -> Sequence[bytes]:
        """Wait until every process has made this call.

        Args:
            message: what this process sends; of one length everywhere, `frame_bytes` at most.
            among: the devices that make this call, in ascending order; all if absent.

        Returns:
            The messages of all these processes, in device order.
        """

    @abstractmethod
    def close(self, failure: BaseException | None = None) -> None:
        """Leave the run, telling the others why if this process failed. May be called again."""

    def all_gather_rows(self, rows: Mapping[int, torch.Tensor]) -> torch.Tensor:
        """Share one row of numbers from each device of this process, and return those of all.

        Args:
            rows: for each of them by number, (k,) float64 on it; k is the same everywhere.

        Returns:
            (D, k) float64 on the first own device.
        """
        (row,) = rows.values()
        messages = self._all_gather_frames(row.cpu().numpy().tobytes())
        table = [torch.frombuffer(each, dtype=torch.float64) for each in messages if each]
        return torch.stack(table).to(row.device) if table else row.new_empty(len(messages), 0)

    def all_gather_objects(self, texts: Mapping[int, bytes]) -> list[bytes]:
        """Share bytes from each device of this process, and return those of all, in device order.

        Args:
            texts: for each of them by number, bytes of any length.
        """
        (text,) = texts.values()
        lengths = [int.from_bytes(each) for each in self.all_gather_bytes(len(text).to_bytes(8))]
        # Messages of one call are of one length, so all send as much as the longest.
        messages = self._all_gather_frames(text.ljust(max(lengths), b"\0"))
        return [bytes(each[:n]) for each, n in zip(messages, lengths, strict=True)]

    def all_gather_values(self, values: Mapping[int, Any]) -> list[Any]:
        """Share a value from each device of this process, and return those of all.

        Args:
            values: for each of them by number, a value that `onefold.core.encoding` knows.

        Returns:
            The values in device order; their tensors lie on the host.
        """
        texts = {number: encode(value, "what a device reports") for number, value in values.items()}
        return [decode(text) for text in self.all_gather_objects(texts)]

    def _all_gather_frames(self, text: bytes) -> list[bytearray]:
        """Share texts of one length that may be longer than a message, one frame after another."""
        found: list[bytearray] = []
        # At least one call, even of nothing: its result says how many processes there are.
        for start in range(0, len(text) or 1, self.frame_bytes):
            messages = self.all_gather_bytes(text[start : start + self.frame_bytes])
            found = found or [bytearray() for _ in messages]
            for each, message in zip(found, messages, strict=True):
                each += message
        return found

    # Between the lead and the other processes, between steps

    def buffer(self, nbytes: int) -> torch.Tensor:
        """Memory to fill for `gather_to_lead`: (at least nbytes,) uint8 on the host.

        It may be the same memory at every call, so filling it invalidates the result of an earlier
        `gather_to_lead`.
        """
        self._buffer = host_buffer(self._buffer, nbytes, self.device, self.allocator)
        return self._buffer

    @abstractmethod
    def gather_to_lead(self) -> list[torch.Tensor]:
        """Bring the content of each process's `buffer` to the lead's process.

        Returns:
            On the lead, each process's buffer in device order, (at least nbytes,) uint8; elsewhere,
            an empty list.
        """

    @abstractmethod
    def scatter_from_lead(self, make: Callable[[int], torch.Tensor] | None) -> torch.Tensor:
        """Bring each process what the lead's process has for it.

        Args:
            make: on the lead's process only: takes the number of a process's first device, and
                returns (k,) uint8 on the host for that process.

        Returns:
            What was made for this process, possibly with more bytes after it.
        """

    # Between neighbors of a pipeline, each pair's messages in their order

    @abstractmethod
    def send(self, device: int, target: int, message: Message) -> None:
        """Send a message from a device of this process; does not wait until it is received."""

    @abstractmethod
    def receive(self, device: int, source: int) -> Message:
        """Wait for the next message from ``source`` to a device of this process.

        Its tensors lie on the host, in memory of their own.
        """

    def has_message(self, device: int, source: int) -> bool:
        """Whether `receive` may be called.

        Where one process drives a whole pipeline, the message must have been sent before.
        """
        return True

    def finish_sending(self) -> None:  # noqa: B027 (most have nothing on its way)
        """Wait until everything that was sent has left; called at the end of a step."""

    def forget_messages(self) -> None:  # noqa: B027 (a failed step ends most runs for all)
        """Forget what is left of a step that failed."""


class LocalTransport(Transport):
    """The transport of a process that drives all devices: there is nobody to wait for."""

    @cached_property
    def _sent(self) -> dict[tuple[int, int], deque[torch.Tensor]]:
        """Messages under way, by the devices from which and to which they go."""
        return defaultdict(deque)

    def all_gather_bytes(self, message: bytes = b"", among: Ranks = None) -> Sequence[bytes]:
        return (message,)

    def all_gather_rows(self, rows: Mapping[int, torch.Tensor]) -> torch.Tensor:
        if len(rows) == 1:
            return next(iter(rows.values())).unsqueeze(0)
        return torch.stack([rows[number].to(self.device) for number in sorted(rows)])

    def all_gather_objects(self, texts: Mapping[int, bytes]) -> list[bytes]:
        return [texts[number] for number in sorted(texts)]

    def gather_to_lead(self) -> list[torch.Tensor]:
        return [self.buffer(0)]

    def scatter_from_lead(self, make: Callable[[int], torch.Tensor] | None) -> torch.Tensor:
        assert make is not None  # this process is the lead's
        return make(0)

    def send(self, device: int, target: int, message: Message) -> None:
        self._sent[device, target].append(packed_message(message))

    def receive(self, device: int, source: int) -> Message:
        return read_message(self._sent[source, device].popleft())

    def has_message(self, device: int, source: int) -> bool:
        return bool(self._sent[source, device])

    def forget_messages(self) -> None:
        self._sent.clear()

    def close(self, failure: BaseException | None = None) -> None:
        pass


def host_buffer(
    memory: torch.Tensor | None, nbytes: int, device: torch.device, allocator: TensorAllocator
) -> torch.Tensor:
    """Return ``memory`` if it is large enough, or new host memory that ``device`` can copy to.

    What is kept apart from the device lies on the host already, and so goes to the same place.
    """
    if memory is not None and memory.numel() >= nbytes:
        return memory
    if device.type == "cpu" or allocator.apart:
        return allocator.empty(nbytes)
    # Pinned for a GPU, which otherwise copies through a buffer of the driver's, and slower.
    return torch.empty(nbytes, dtype=torch.uint8, pin_memory=True)


@dataclass(frozen=True, slots=True)
class Message:
    """What one device of a pipeline sends another."""

    head: Any
    """Values that `onefold.core.encoding` knows."""
    tensors: Sequence[torch.Tensor | None] = ()


_LENGTH = struct.Struct("<q")


def head_of(message: Message) -> tuple[bytes, int]:
    """What a message begins with when it is written to memory, and how many bytes it takes."""
    rows = [None if tensor is None else _described(tensor) for tensor in message.tensors]
    head = encode([message.head, rows], "what a stage gives")
    head = _LENGTH.pack(len(head)) + head
    tensors = [tensor for tensor in message.tensors if tensor is not None]
    sizes = [aligned(_extent(tensor) * tensor.element_size()) for tensor in tensors]
    return head, aligned(len(head)) + sum(sizes)


def write_message(message: Message, head: bytes, memory: torch.Tensor) -> None:
    """Write a message to memory, (nbytes,) uint8 on the host, from which it is read again."""
    memory[: len(head)] = torch.frombuffer(bytearray(head), dtype=torch.uint8)
    start = aligned(len(head))
    for tensor in message.tensors:
        if tensor is None or not tensor.numel():
            continue
        count = _extent(tensor)
        stop = start + count * tensor.element_size()
        values = tensor.detach().as_strided((count,), (1,))
        memory[start:stop].view(tensor.dtype).copy_(values)
        start += aligned(stop - start)


def packed_message(message: Message) -> torch.Tensor:
    """Write a message to memory of its own."""
    head, nbytes = head_of(message)
    memory = torch.empty(nbytes, dtype=torch.uint8)
    write_message(message, head, memory)
    return memory


def read_message(packed: torch.Tensor) -> Message:
    """Read what `write_message` wrote; the tensors lie in its memory."""
    (length,) = _LENGTH.unpack(packed[: _LENGTH.size].numpy().tobytes())
    start = _LENGTH.size + length
    value, rows = decode(packed[_LENGTH.size : start].numpy().tobytes())
    start = aligned(start)
    tensors: list[torch.Tensor | None] = []
    for row in rows:
        if row is None:
            tensors.append(None)
            continue
        name, shape, stride, count = row
        dtype: torch.dtype = getattr(torch, name)
        # No view: what is one may not be written to in place where autograd looks on.
        made = torch.empty(0, dtype=dtype)
        place = (packed.storage_offset() + start) // dtype.itemsize
        made.set_(packed.untyped_storage(), place, shape, stride) if count else made.resize_(shape)
        tensors.append(made)
        start += aligned(count * dtype.itemsize)
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
