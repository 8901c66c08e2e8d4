"""Connects processes: sends short messages, numbers, bytes, and tensors of a pipeline.

A `Transport` knows nothing of steps, parameters or gradients. Every process makes the same calls in
the same order. Each call may block, at most for the transport's timeout, and raises `PeerError` if
another device is lost, fails, or does not make the call.
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
    """Return the error of a transport that was closed.

    Args:
        failure: why it was closed; empty if the script closed it.
    """
    why = f"because this device {failure}" if failure else "because the script closed it"
    return OnefoldError(
        f"this trainer has left its run, {why}, and accepts no more calls. Start a new run"
    )


class Failure(msgspec.Struct, frozen=True):
    """Failure of a device, as it reports it to the others."""

    device: int
    step: int
    words: str
    disagreement: str = ""
    """Message of a `DisagreementError`, which all devices raise with the same text; else empty."""

    @classmethod
    def of(cls, failure: BaseException, *, device: int, step: int) -> Failure:
        """Describe a device's own failure."""
        alike = message_of(failure) if isinstance(failure, DisagreementError) else ""
        return cls(device, step, words_of_failure(failure, step), alike)

    def error(self) -> DisagreementError | PeerFailed:
        """Return the error that a device raises when it receives the report."""
        if self.disagreement:
            return DisagreementError(self.disagreement)
        return PeerFailed(f"device {self.device} {self.words}", device=self.device, step=self.step)


class Transport(ABC):
    """Connects this process to the other processes of a run.

    Args:
        device: the first device of this process.
        allocator: allocates its `buffer`, and what the host stores of the model.
    """

    step = 1
    """Step of the run, for error messages."""
    frame_bytes = 32 * 1024
    """Maximum length of a message of ``all_gather_bytes``."""

    def __init__(
        self, device: torch.device, allocator: TensorAllocator = DEFAULT_ALLOCATOR
    ) -> None:
        self.device, self.allocator = device, allocator
        self._buffer: torch.Tensor | None = None

    def begin_step(self, step: int) -> None:
        """Set the step of the run, for error messages."""
        self.step = step

    @abstractmethod
    def all_gather_bytes(self, message: bytes = b"", among: Ranks = None) -> Sequence[bytes]:
        """Wait until every process has made this call.

        Args:
            message: this process's message; of the same length in every process, at most
                `frame_bytes`.
            among: the devices that make this call, in ascending order; all by default.

        Returns:
            The messages of these processes, in device order.
        """

    @abstractmethod
    def close(self, failure: BaseException | None = None) -> None:
        """Leave the run, and report a failure of this process. May be called again."""

    def all_gather_rows(self, rows: Mapping[int, torch.Tensor]) -> torch.Tensor:
        """Gather one row of numbers from each device.

        Args:
            rows: for each device of this process by number, (k,) float64 on it; k is the same for
                all.

        Returns:
            (D, k) float64 on this process's first device.
        """
        (row,) = rows.values()
        # Send bytes through the host, so that the values arrive with the same bits.
        messages = self._all_gather_frames(row.cpu().numpy().tobytes())
        table = [torch.frombuffer(each, dtype=torch.float64) for each in messages if each]
        return torch.stack(table).to(row.device) if table else row.new_empty(len(messages), 0)

    def all_gather_objects(self, texts: Mapping[int, bytes]) -> list[bytes]:
        """Gather bytes from each device; return them in device order.

        Args:
            texts: for each device of this process by number, bytes of any length.
        """
        (text,) = texts.values()
        lengths = [int.from_bytes(each) for each in self.all_gather_bytes(len(text).to_bytes(8))]
        # Messages of one call have one length, so pad all to the longest.
        messages = self._all_gather_frames(text.ljust(max(lengths), b"\0"))
        return [bytes(each[:n]) for each, n in zip(messages, lengths, strict=True)]

    def all_gather_values(self, values: Mapping[int, Any]) -> list[Any]:
        """Gather a value from each device.

        Args:
            values: for each device of this process by number, a value that `onefold.core.encoding`
                supports.

        Returns:
            The values in device order; their tensors are on the host.
        """
        texts = {number: encode(value, "a device's report") for number, value in values.items()}
        return [decode(text) for text in self.all_gather_objects(texts)]

    def _all_gather_frames(self, text: bytes) -> list[bytearray]:
        """Gather texts of one length that may be longer than a message, one frame after another."""
        found: list[bytearray] = []
        # Make at least one call, even for empty texts: the result has one entry per process.
        for start in range(0, len(text) or 1, self.frame_bytes):
            messages = self.all_gather_bytes(text[start : start + self.frame_bytes])
            found = found or [bytearray() for _ in messages]
            for each, message in zip(found, messages, strict=True):
                each += message
        return found

    # Calls between two steps, between the lead and the other processes.

    def buffer(self, nbytes: int) -> torch.Tensor:
        """Return memory to fill for `gather_to_lead`: (at least nbytes,) uint8 on the host.

        It may be the same memory in every call, so filling it invalidates the result of an earlier
        `gather_to_lead`.
        """
        self._buffer = host_buffer(self._buffer, nbytes, self.device, self.allocator)
        return self._buffer

    @abstractmethod
    def gather_to_lead(self) -> list[torch.Tensor]:
        """Gather the content of each process's `buffer` in the lead's process.

        Returns:
            On the lead, each process's buffer in device order, (at least nbytes,) uint8; on other
            devices, an empty list.
        """

    @abstractmethod
    def scatter_from_lead(self, make: Callable[[int], torch.Tensor] | None) -> torch.Tensor:
        """Scatter bytes from the lead's process, which makes them for each process.

        Args:
            make: in the lead's process only: takes the number of a process's first device, and
                returns (k,) uint8 on the host for that process.

        Returns:
            The bytes made for this process, possibly followed by more bytes.
        """

    # Calls between neighbors of a pipeline; the messages of a pair keep their order.

    @abstractmethod
    def send(self, device: int, target: int, message: Message) -> None:
        """Send a message from a device of this process; does not wait until it is received.

        With k devices from a device to the end of its pipeline, the device never has more than k
        unfinished shards, nor more than k messages in flight to it.
        """

    @abstractmethod
    def receive(self, device: int, source: int) -> Message:
        """Wait for the next message from ``source`` to a device of this process.

        Its tensors are on the host, in separate memory.
        """

    def has_message(self, device: int, source: int) -> bool:
        """Whether `receive` may be called.

        If one process drives a whole pipeline, the message must have been sent before.
        """
        return True

    def finish_sending(self) -> None:  # noqa: B027 (most have nothing on its way)
        """Wait until everything that was sent has left; called at the end of a step."""

    def forget_messages(self) -> None:  # noqa: B027 (a failed step ends most runs for all)
        """Drop the messages that a failed step left."""


class LocalTransport(Transport):
    """The transport of a process that drives all devices, which never waits."""

    @cached_property
    def _sent(self) -> dict[tuple[int, int], deque[torch.Tensor]]:
        """Messages in flight, by sender and receiver."""
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
        # Every other process passes None, but this process is the lead's.
        assert make is not None
        return make(0)

    def send(self, device: int, target: int, message: Message) -> None:
        # Pack the message: the copy lets the sender overwrite its tensors before they are received.
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

    If parameters are stored apart from the device, they are on the host already; then this is plain
    memory of the allocator.
    """
    if memory is not None and memory.numel() >= nbytes:
        return memory
    if device.type == "cpu" or allocator.apart:
        return allocator.empty(nbytes)
    # Pin the memory: a GPU otherwise copies through a buffer of the driver, which is slower.
    return torch.empty(nbytes, dtype=torch.uint8, pin_memory=True)


@dataclass(frozen=True, slots=True)
class Message:
    """A message between two devices of a pipeline."""

    head: Any
    """Values that `onefold.core.encoding` supports."""
    tensors: Sequence[torch.Tensor | None] = ()


_LENGTH = struct.Struct("<q")


def head_of(message: Message) -> tuple[bytes, int]:
    """Return the head of a message as it is written to memory, and its size in bytes."""
    # Shards have different sizes, and a stage may return anything, so each message describes its
    # tensors. Strides are included: a kernel may depend on them, and so do the bits of its result.
    rows = [None if tensor is None else _described(tensor) for tensor in message.tensors]
    head = encode([message.head, rows], "the output of a stage")
    head = _LENGTH.pack(len(head)) + head
    tensors = [tensor for tensor in message.tensors if tensor is not None]
    sizes = [aligned(_extent(tensor) * tensor.element_size()) for tensor in tensors]
    return head, aligned(len(head)) + sum(sizes)


def write_message(message: Message, head: bytes, memory: torch.Tensor) -> None:
    """Write a message to memory, (nbytes,) uint8 on the host, for `read_message`."""
    memory[: len(head)] = torch.frombuffer(bytearray(head), dtype=torch.uint8)
    start = aligned(len(head))
    for tensor in message.tensors:
        if tensor is None or not tensor.numel():
            continue
        count = _extent(tensor)
        stop = start + count * tensor.element_size()
        # Copy the whole extent, including gaps between elements, so that strides stay valid.
        values = tensor.detach().as_strided((count,), (1,))
        memory[start:stop].view(tensor.dtype).copy_(values)
        start += aligned(stop - start)


def packed_message(message: Message) -> torch.Tensor:
    """Write a message to new memory."""
    head, nbytes = head_of(message)
    memory = torch.empty(nbytes, dtype=torch.uint8)
    write_message(message, head, memory)
    return memory


def read_message(packed: torch.Tensor) -> Message:
    """Read a message that `write_message` wrote; the tensors are stored in its memory."""
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
        # Create no view of ``packed``: autograd forbids writing to some views in place.
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
    """Count the elements from the first to the last one of a tensor, including gaps."""
    if not tensor.numel():
        return 0
    pairs = zip(tensor.shape, tensor.stride(), strict=True)
    return 1 + sum((size - 1) * stride for size, stride in pairs)
