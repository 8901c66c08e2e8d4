"""Where parameters, partial sums and the board of a run lie."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import torch

from onefold.core.flat import FlatTensors, Layout
from onefold.core.fold import Published
from onefold.core.roster import Roster
from onefold.core.shard import Plan
from onefold.exchange.board import Board
from onefold.exchange.frozenmemory import FrozenMemory
from onefold.exchange.spans import Spanned
from onefold.system.heap import ORDINARY, Heap

__all__ = ["Arrivals", "FirstValues", "Memory", "Start", "new_flat", "write_first"]


class FirstValues(Protocol):
    """Values of a tensor that are drawn when they are needed."""

    def write_to(self, view: torch.Tensor) -> None:
        """Draw them into a tensor of their shape, on any device."""


@dataclass(frozen=True, slots=True)
class Start:
    """The values that a process starts with; the lead's replace those of all others."""

    trained: Sequence[torch.Tensor | FirstValues]
    """The trained parameters, in the order of the layout."""
    other: Sequence[torch.Tensor | FirstValues]
    """The other parameters."""
    buffers: FlatTensors
    """The module's buffers; overwritten unless this process is the lead."""
    frozen: Sequence[torch.Tensor | FirstValues] = ()
    """The frozen parameters of which each device is to keep a part."""


class Arrivals(Protocol):
    """Partial sums that are still on their way to the owners of spans."""

    def wait_for(self, chunk: int) -> None:
        """Wait until this chunk of this process's span has come from all devices."""

    def finish(self) -> None:
        """Wait until everything is received and sent."""


class Memory(ABC):
    """Memory of this process's devices, and what they can see of that of the others.

    The methods are called in the order of a step: `publish` for each block, `collect`, then
    `partial` for each block and owned span, `hand_on`, `release`. `collect`, `hand_on` and
    `follow_lead` are called on all devices, and may block where other processes take part.
    """

    board: Board
    """Own rows may be written before ``collect``; all rows may be read after it."""
    trained: dict[int, FlatTensors]
    """The trained parameters, by number of this process's devices."""
    other: dict[int, FlatTensors]
    """The other parameters, by number of this process's devices."""
    frozen: FrozenMemory | None = None
    """What this process's device keeps of the frozen parameters, if it does not have all."""
    heap: Heap = ORDINARY
    """Where what is large of this process lies on the host."""
    is_common: bool = False
    """Whether all processes compute with the very same memory of the parameters."""
    is_lent: bool = False
    """Whether each device keeps its span of the trained parameters, and has others brought when it
    needs them: then there is memory for all of them only now and then."""

    @abstractmethod
    def bind(self, roster: Roster) -> None:
        """Adopt a roster: who owns which span. Called between steps, and before the first one."""

    @abstractmethod
    def publish(self, device: int, slot: int, gradients: Sequence[torch.Tensor | None]) -> None:
        """Take over the partial sum of one of ``device``'s blocks; see `Exchange.publish`."""

    @abstractmethod
    def collect(self, plan: Plan) -> Arrivals | None:
        """Wait for the others' boards and partial sums to be visible here, or on their way.

        Returns:
            What may still be on its way; None if all is here.
        """

    @abstractmethod
    def collect_board(self, plan: Plan) -> None:
        """Wait for the others' boards to be visible here, where no partial sums are published."""

    @abstractmethod
    def partial(self, place: Published) -> Spanned:
        """A partial sum, as the owner of a span of this process reads it."""

    def home(self, device: int) -> FlatTensors | None:
        """Where a device's totals go, if they cannot stay where the leftmost partial sum lies."""
        return None

    @abstractmethod
    def hand_on(self) -> None:
        """Bring the updated spans to every device, and wait until they are there."""

    @abstractmethod
    def share_gradient(self, whole: FlatTensors) -> None:
        """Bring the gradient of every span to every process; may block as `hand_on` does.

        Args:
            whole: has the layout of gradients, and holds those of this process's spans; complete
                afterwards.
        """

    @abstractmethod
    def release(self) -> None:
        """Drop the gradients that were published."""

    def make_own(self) -> None:  # noqa: B027 (most have memory of their own anyway)
        """Have what this process sees of the parameters be its own from here on.

        Called at the end; the other processes may go on with what they see.
        """

    @abstractmethod
    def follow_lead(self, buffers: FlatTensors) -> None:
        """Give every process the parameters and buffers of the lead's process.

        Args:
            buffers: those of this process's first device; overwritten unless it is the lead.
        """

    @abstractmethod
    def adopt_lead(self, values: torch.Tensor) -> None:
        """Overwrite a tensor of every process with the lead's, where `is_lent`.

        Called on all devices; may block. Elsewhere all parameters are the lead's from the start.
        """


def write_first(flat: FlatTensors, values: Sequence[torch.Tensor | FirstValues]) -> None:
    """Write the first values to flat memory: what is not drawn yet, one tensor after the other."""
    there = [value if isinstance(value, torch.Tensor) else None for value in values]
    flat.write(there, skip={number for number, value in enumerate(there) if value is None})
    for view, value in zip(flat.views, values, strict=True):
        if not isinstance(value, torch.Tensor):
            value.write_to(view)


def new_flat(layout: Layout, device: torch.device, heap: Heap) -> FlatTensors:
    """Make flat memory of zeros on a device: from the heap, if that is the processor."""
    if device.type == "cpu" and layout.nbytes:
        return FlatTensors(layout, memory=heap.zeros(layout.nbytes))
    return FlatTensors(layout, device=device)
