"""How the processes of a run reach each other: short words, numbers, and bytes of any length.

A transport knows nothing of steps, parameters or gradients. Every process makes the same calls in
the same order. Each call may block, for the transport's limit at most, and raises `PeerError` when
another device is lost, has failed, or does not make it.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence

import torch

from onefold.errors import OnefoldError
from onefold.system.heap import ORDINARY, Heap

__all__ = ["Alone", "Transport", "has_left", "roomy"]


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


class Courier(ABC):
    """Transfers between the lead and the other processes, made between steps."""

    @abstractmethod
    def room(self, nbytes: int) -> torch.Tensor:
        """Memory to fill for `bring`: (at least nbytes,) uint8 on the host.

        It may be the same memory at every call, so filling it invalidates the result of an earlier
        `bring`.
        """

    @abstractmethod
    def bring(self) -> list[torch.Tensor]:
        """Bring the content of each process's `room` to the lead's process.

        Returns:
            On the lead, each process's room in device order, (at least nbytes,) uint8; elsewhere,
            an empty list.
        """

    @abstractmethod
    def hand_out(self, make: Callable[[int], torch.Tensor] | None) -> torch.Tensor:
        """Bring each process what the lead's process has for it.

        Args:
            make: on the lead's process only: takes the number of a process's first device, and
                returns (k,) uint8 on the host for that process.

        Returns:
            What was made for this process, possibly with more bytes after it.
        """


class Transport(Courier):
    """Reaches the other processes of a run."""

    step = 1
    """The step that the run is at, for error messages."""
    frame_bytes = 32 * 1024
    """The longest word that `meet` accepts."""

    def begin_step(self, step: int) -> None:
        """Note which step the run is at, for error messages."""
        self.step = step

    @abstractmethod
    def meet(self, word: bytes = b"") -> Sequence[bytes]:
        """Wait until every process has made this call.

        Args:
            word: what this process tells the others; of one length everywhere, `frame_bytes` at
                most.

        Returns:
            The words of all processes, in device order.
        """

    @abstractmethod
    def close(self, failure: BaseException | None = None) -> None:
        """Leave the run, telling the others why if this process failed. May be called again."""

    def share(self, rows: Mapping[int, torch.Tensor]) -> torch.Tensor:
        """Share one row of numbers from each device of this process, and return those of all.

        Args:
            rows: for each of them by number, (k,) float64 on it; k is the same everywhere.

        Returns:
            (D, k) float64 on the first own device.
        """
        (row,) = rows.values()
        words = self._meet_in_frames(row.cpu().numpy().tobytes())
        table = [torch.frombuffer(word, dtype=torch.float64) for word in words if word]
        return torch.stack(table).to(row.device) if table else row.new_empty(len(words), 0)

    def gather_bytes(self, texts: Mapping[int, bytes]) -> list[bytes]:
        """Share bytes from each device of this process, and return those of all, in device order.

        Args:
            texts: for each of them by number, bytes of any length.
        """
        (text,) = texts.values()
        lengths = [int.from_bytes(word) for word in self.meet(len(text).to_bytes(8))]
        # Words of one meeting are of one length, so all send as much as the longest.
        padded = text.ljust(max(lengths), b"\0")
        words = self._meet_in_frames(padded)
        return [bytes(word[:n]) for word, n in zip(words, lengths, strict=True)]

    def _meet_in_frames(self, text: bytes) -> list[bytearray]:
        """Share texts of one length that may be longer than a word, one frame after the other."""
        parts: list[bytearray] = []
        # At least one meeting, even of nothing: it says how many processes there are.
        for start in range(0, len(text) or 1, self.frame_bytes):
            words = self.meet(text[start : start + self.frame_bytes])
            parts = parts or [bytearray() for _ in words]
            for part, word in zip(parts, words, strict=True):
                part += word
        return parts


class Alone(Transport):
    """The transport of a process that drives all devices: there is nobody to wait for.

    Args:
        device: the first device.
        heap: where its `room` lies.
    """

    def __init__(self, device: torch.device, heap: Heap = ORDINARY) -> None:
        self._device = device
        self._heap = heap
        self._room: torch.Tensor | None = None

    def meet(self, word: bytes = b"") -> Sequence[bytes]:
        return (word,)

    def share(self, rows: Mapping[int, torch.Tensor]) -> torch.Tensor:
        if len(rows) == 1:
            return next(iter(rows.values())).unsqueeze(0)
        return torch.stack([rows[number].to(self._device) for number in sorted(rows)])

    def gather_bytes(self, texts: Mapping[int, bytes]) -> list[bytes]:
        return [texts[number] for number in sorted(texts)]

    def room(self, nbytes: int) -> torch.Tensor:
        self._room = roomy(self._room, nbytes, self._device, self._heap)
        return self._room

    def bring(self) -> list[torch.Tensor]:
        if self._room is None:
            raise ValueError("there is nothing to bring: fill a room first")
        return [self._room]

    def hand_out(self, make: Callable[[int], torch.Tensor] | None) -> torch.Tensor:
        if make is None:
            raise ValueError("expected the lead's process to say what there is to hand out")
        return make(0)

    def close(self, failure: BaseException | None = None) -> None:
        pass


def roomy(
    memory: torch.Tensor | None, nbytes: int, device: torch.device, heap: Heap
) -> torch.Tensor:
    """Return ``memory`` if it is large enough, or new host memory that ``device`` can copy to.

    What is kept apart from the device lies on the host already, and so goes to the same place.
    """
    if memory is not None and memory.numel() >= nbytes:
        return memory
    if device.type != "cuda" or heap.apart:
        return heap.empty(nbytes)
    # Pinned for a GPU, which otherwise copies through a buffer of the driver's, and slower.
    return torch.empty(nbytes, dtype=torch.uint8, pin_memory=True)
