"""Where parameters, partial sums and the board of a run lie."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import torch

from onefold.core.flat import FlatTensors
from onefold.core.fold import Published
from onefold.core.roster import Roster
from onefold.core.shard import Plan
from onefold.exchange.board import Board
from onefold.exchange.spans import Spanned

__all__ = ["Arrivals", "Memory", "Start"]


@dataclass(frozen=True, slots=True)
class Start:
    """The values that a process brings along; those of the lead become everybody's."""

    trained: Sequence[torch.Tensor]
    other: Sequence[torch.Tensor]
    buffers: FlatTensors
    """Written to where this process is not the lead."""


class Arrivals(Protocol):
    """Partial sums that are on their way to the owners of spans."""

    def wait_for(self, chunk: int) -> None:
        """Until the chunk of this number of the own span has come from all devices."""

    def finish(self) -> None:
        """Until everything has come and gone."""


class Memory(ABC):
    """Memory of the devices of this process, and what they can see of that of the others.

    Its methods are called in the order of a step: `publish` for each block, `collect`, then
    `partial` for each block and owned span, `hand_on`, `release`. `collect`, `hand_on` and
    `follow_lead` may block where other processes take part.
    """

    board: Board
    """Own rows may be written before ``collect``; all rows may be read after it."""
    trained: dict[int, FlatTensors]
    """For each device of this process, the trained parameters."""
    other: dict[int, FlatTensors]
    """For each device of this process, the other parameters."""
    is_common: bool = False
    """All processes compute with the very same memory of the parameters."""

    @abstractmethod
    def bind(self, roster: Roster) -> None:
        """Follow a roster: who owns which span. Called between steps, and before the first one."""

    @abstractmethod
    def publish(self, device: int, slot: int, gradients: Sequence[torch.Tensor | None]) -> None:
        """Take the partial sum of one of ``device``'s blocks; see `Exchange.publish`."""

    @abstractmethod
    def collect(self, plan: Plan) -> Arrivals | None:
        """Make the others' boards and partial sums visible here, as far as they are not.

        Returns:
            What is still on its way, if anything can be.
        """

    @abstractmethod
    def partial(self, place: Published) -> Spanned:
        """A partial sum, as the owner of a span of this process reads it."""

    def home(self, device: int) -> FlatTensors | None:
        """Where a device's totals go, if they cannot stay where the leftmost partial sum lies."""
        return None

    @abstractmethod
    def hand_on(self) -> None:
        """Bring the updated spans to every device; returns when they are there."""

    @abstractmethod
    def release(self) -> None:
        """Let go of the gradients that were published."""

    @abstractmethod
    def follow_lead(self, buffers: FlatTensors) -> None:
        """Give every process the parameters that the lead's process has, and its ``buffers``.

        Args:
            buffers: of this process's first device; written to where it is not the lead.
        """
