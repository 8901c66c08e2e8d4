"""The one interface through which devices trade, and the memory that they trade through.

Note: what happens in a step, and who may touch what
----------------------------------------------------
1. ``agree`` returns when every device has begun the same call, with what each of them says of it
   (see `onefold.core.head`). Until then nobody computes with the parameters: whoever changed them
   between two calls has finished.
2. Every device *publishes* its partial sums and fills its own rows of the `Board`.
3. ``collect`` returns when all have published. From then on the board may be read as a whole, and
   the totals of this process's own spans stand ready.
4. The owner updates its spans of the parameters, and nobody else touches them.
5. ``spread`` returns when every device has every span. From then on partial sums and board may be
   written again.

Every device of the run makes the same calls in the same order. ``agree``, ``collect``, ``share``
and ``spread`` may block, for ``timeout_s`` seconds at the most; they raise `PeerError` when another
device is lost, has failed, or does not arrive. So do, between steps, ``follow_lead``, ``bring`` and
``hand_out``, through which checkpoints go.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from onefold.core.flat import FlatTensors, Layout, Piece, cut_spans
from onefold.core.fold import max_blocks
from onefold.core.shard import Plan

__all__ = [
    "LEFT",
    "Board",
    "BoardShape",
    "Courier",
    "Exchange",
    "LoneExchange",
    "Start",
    "Storage",
    "roomy",
]


LEFT = (
    "this trainer has left its run, closed by the script or after a failure, and the other devices "
    "go on without it: make a new run"
)
"""What an exchange that has been closed says."""


@dataclass(frozen=True, slots=True)
class Storage:
    """What the devices of a run have in common: the sizes of everything that is traded."""

    trained: Layout
    """Parameters that the optimizer updates; gradients lie likewise."""
    other: Layout
    """The rest of the parameters: frozen ones, and those that no optimizer holds."""
    buffers: Layout
    """The module's buffers."""
    pieces: tuple[Piece, ...]
    """Of the trained parameters."""
    shards: int
    """V."""
    devices: int
    """D."""

    @property
    def spans(self) -> tuple[range, ...]:
        """The pieces that each device updates."""
        return cut_spans(self.pieces, self.devices)

    @property
    def slots(self) -> int:
        """Partial sums that a device may have to publish, whatever the plan."""
        return max_blocks(self.shards) if self.devices > 1 else 1

    @property
    def board(self) -> BoardShape:
        """The sizes of the board."""
        return BoardShape(
            devices=self.devices,
            shards=self.shards,
            parameters=len(self.trained.entries),
            buffers=self.buffers,
        )


@dataclass(frozen=True, slots=True)
class BoardShape:
    """Numbers that fix how large a board is."""

    devices: int
    shards: int
    parameters: int
    buffers: Layout

    @property
    def host_bytes(self) -> tuple[int, ...]:
        """Bytes of weights, gave and changed, each rounded up to 64."""
        changed = self.shards * len(self.buffers.entries)
        sizes = (self.shards * 8, self.devices * self.parameters * 4, changed)
        return tuple(-(-size // 64) * 64 for size in sizes)

    @property
    def device_bytes(self) -> int:
        """Bytes of totals and buffer rows."""
        return -(-self.shards * 8 // 64) * 64 + self.shards * self.buffers.nbytes


@dataclass(frozen=True, slots=True)
class Start:
    """The values that a process brings along; those of the lead become everybody's."""

    trained: Sequence[torch.Tensor]
    other: Sequence[torch.Tensor]
    buffers: FlatTensors
    """Written to where this process is not the lead."""


class Board:
    """What every device tells the others in a step, beside its partial sums.

    A device writes its own row of ``gave`` and its own shards' rows of the rest. What
    the host knows lies on the host, as NumPy arrays: single numbers are written to them, which
    costs a tensor far more. What a device computes lies where ``computed`` lies, so that nobody has
    to wait for a device to know it.

    Args:
        shape: its sizes.
        known: (sum(shape.host_bytes),) uint8 on the host, zeros.
        computed: (shape.device_bytes,) uint8 on a device, zeros.
    """

    def __init__(self, shape: BoardShape, known: torch.Tensor, computed: torch.Tensor) -> None:
        self.shape = shape
        self.known = known
        parts = torch.split(known, list(shape.host_bytes))
        devices, shards = shape.devices, shape.shards
        self.weights = _typed(parts[0], torch.float64, (shards,)).numpy()
        """(V,) float64: each shard's part of the divisor, or a code below 0 that says why there is
        none, see `onefold.core.weights_of_step`."""
        self.gave = _typed(parts[1], torch.int32, (devices, shape.parameters)).numpy()
        """(D, P) int32: how many of a device's shards gave a gradient to each parameter."""
        self.changed = _typed(parts[2], torch.uint8, (shards, len(shape.buffers.entries))).numpy()
        """(V, B) uint8: whether a shard changed a buffer."""
        rows = shape.buffers.nbytes
        first = shape.device_bytes - shards * rows
        self.totals = _typed(computed[:first], torch.float64, (shards,))
        """(V,) float64: each shard's part of the loss."""
        self.on_host = computed.device.type == "cpu"
        """Whether what devices compute lies on the host as well."""
        self._host_totals = self.totals.numpy() if self.on_host else None
        self.rows_memory = computed[first:].view(shards, rows)
        """(V, bytes of the buffers) uint8: the memory of ``buffer_rows``."""
        self.buffer_rows = [
            FlatTensors(shape.buffers, memory=self.rows_memory[shard]) for shard in range(shards)
        ]
        """V sets of the module's buffers: what each shard made of them."""

    @classmethod
    def private(cls, shape: BoardShape, device: torch.device) -> Board:
        """A board in memory of this process."""
        known = torch.zeros(sum(shape.host_bytes), dtype=torch.uint8)
        return cls(shape, known, torch.zeros(shape.device_bytes, dtype=torch.uint8, device=device))

    def clear_rows(self, device: int, shards: range) -> None:
        """Empty one device's rows before a step."""
        rows = slice(shards.start, shards.stop)
        self.gave[device] = 0
        self.weights[rows] = 0.0
        self.changed[rows] = 0
        if self._host_totals is not None:
            self._host_totals[rows] = 0.0
        else:
            self.totals[rows].zero_()

    def set_total(self, shard: int, total: torch.Tensor) -> None:
        """Note a shard's part of the loss, () float64; on a GPU without waiting for it."""
        if self._host_totals is not None:
            self._host_totals[shard] = total.item()
        else:
            self.totals[shard : shard + 1].copy_(total, non_blocking=True)

    def row(self, device: int, shards: range) -> torch.Tensor:  # (row_bytes,) uint8 on the host
        """What ``device`` wrote on this board, as a message to others.

        Its totals are in it where they lie on the host; where they do not, `totals` must travel by
        themselves, and so must the buffers in any case.
        """
        parts = self._row_parts(device, shards)
        return torch.from_numpy(np.concatenate([part.view(np.uint8).ravel() for part in parts]))

    def empty_row(self, device: int, shards: range) -> torch.Tensor:
        """Room for another board's `row`."""
        parts = self._row_parts(device, shards)
        return torch.empty(sum(part.nbytes for part in parts), dtype=torch.uint8)

    def take_row(self, device: int, shards: range, message: torch.Tensor) -> None:
        """Write another board's `row` onto this one."""
        start = 0
        for part in self._row_parts(device, shards):
            stop = start + part.nbytes
            part[...] = message[start:stop].numpy().view(part.dtype).reshape(part.shape)
            start = stop

    def _row_parts(self, device: int, shards: range) -> list[np.ndarray[Any, Any]]:
        rows = slice(shards.start, shards.stop)
        parts = [self.gave[device], self.weights[rows], self.changed[rows]]
        return [*parts, self.totals[rows].numpy()] if self.on_host else parts


def _typed(memory: torch.Tensor, dtype: torch.dtype, shape: tuple[int, ...]) -> torch.Tensor:
    numel = torch.Size(shape).numel()
    return memory[: numel * dtype.itemsize].view(dtype).view(shape)


class Courier(ABC):
    """What goes between the lead and the other processes between steps."""

    @abstractmethod
    def follow_lead(self, buffers: FlatTensors) -> None:
        """Give every process the parameters that the lead's process has, and its ``buffers``.

        Args:
            buffers: of this process's first device; written to where it is not the lead.
        """

    @abstractmethod
    def room(self, nbytes: int) -> torch.Tensor:
        """Memory to fill for `bring`: (at least nbytes,) uint8 on the host.

        The same memory again and again, so what came of an earlier `bring` is no longer valid.
        """

    @abstractmethod
    def bring(self) -> list[torch.Tensor]:
        """Bring what lies in each process's `room` to the lead's process.

        Returns:
            There, each process's room in the order of their devices; elsewhere, nothing.
        """

    @abstractmethod
    def hand_out(self, make: Callable[[int], torch.Tensor] | None) -> torch.Tensor:
        """Bring each process what the lead's process has for it.

        Args:
            make: where the lead is: takes the number of a process's first device, and returns
                (k,) uint8 on the host for that process.

        Returns:
            What was made for this process; there may be bytes behind it.
        """


class Exchange(Courier):
    """Moves bytes between the devices of one run; the order of calls is in the note above."""

    board: Board
    """Own rows may be written before ``collect``; all rows may be read after it."""
    trained: dict[int, FlatTensors]
    """For each device of this process, the trained parameters."""
    other: dict[int, FlatTensors]
    """For each device of this process, the other parameters."""
    one_memory: bool = False
    """All processes compute with the very same memory of the parameters."""

    @abstractmethod
    def agree(self, step: int, word: bytes) -> Sequence[bytes]:
        """Wait for every process to have begun the same call.

        Args:
            step: that the run is at, for errors.
            word: what this process says of its call, of the same length everywhere.

        Returns:
            The words of all processes, in the order of their devices.
        """

    @abstractmethod
    def publish(self, device: int, slot: int, gradients: Sequence[torch.Tensor | None]) -> None:
        """Hand over the partial sum of one of ``device``'s blocks; never blocks.

        Args:
            device: a device of this process.
            slot: the number of the block among those of the device, from the left.
            gradients: one tensor a trained parameter, shaped like it; None for none. They belong to
                the exchange until ``spread``, which may add to them in place.
        """

    @abstractmethod
    def collect(self, plan: Plan) -> None:
        """Wait for every device to have published; afterwards the own spans' totals are ready."""

    @abstractmethod
    def totals(self, device: int) -> Sequence[torch.Tensor | None]:
        """The summed gradient of each piece of an own device's span, valid until ``spread``.

        None is allowed where no shard gave one.
        """

    @abstractmethod
    def share(self, rows: Mapping[int, torch.Tensor]) -> torch.Tensor:
        """Give one row of numbers for each own device and get those of all.

        Args:
            rows: own device number to a (k,) float64 tensor there, k the same everywhere.

        Returns:
            (D, k) float64 on the first own device.
        """

    @abstractmethod
    def spread(self) -> None:
        """Wait until the updated spans are in every device's parameters."""

    @abstractmethod
    def close(self, failure: BaseException | None = None) -> None:
        """Leave the run, telling the others why if it is for a failure. May be called again."""


class LoneExchange(Exchange):
    """An exchange inside one process: there is nobody to bring anything to, or to leave."""

    _room: torch.Tensor | None = None

    def agree(self, step: int, word: bytes) -> Sequence[bytes]:
        return (word,)

    def follow_lead(self, buffers: FlatTensors) -> None:
        pass  # copies of the first device's model follow it at the next step

    def room(self, nbytes: int) -> torch.Tensor:
        self._room = roomy(self._room, nbytes, self.board.rows_memory.device)
        return self._room

    def bring(self) -> list[torch.Tensor]:
        return [] if self._room is None else [self._room]

    def hand_out(self, make: Callable[[int], torch.Tensor] | None) -> torch.Tensor:
        if make is None:
            raise ValueError("the lead's process must say what there is to hand out")
        return make(0)

    def close(self, failure: BaseException | None = None) -> None:
        pass


def roomy(memory: torch.Tensor | None, nbytes: int, device: torch.device) -> torch.Tensor:
    """``memory`` if it is large enough, or new memory on the host that ``device`` copies to."""
    if memory is not None and memory.numel() >= nbytes:
        return memory
    return torch.empty(nbytes, dtype=torch.uint8, pin_memory=device.type == "cuda")
