"""All devices of a run, and which of them a process drives, as a record."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from onefold.core.world import World

__all__ = ["Team"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Team:
    """All devices of the run, and which of them this process drives."""

    devices: tuple[torch.device, ...]
    """By number."""
    own: tuple[int, ...]
    """Numbers of this process's devices."""
    world: World
    """How this process was started."""
    trainer: int
    """Counts the trainers of a script, from 0."""

    @property
    def hosts(self) -> tuple[int, ...]:
        """Number of each device's host; ranks of a host follow one another."""
        here = self.world.local_size if self.world.launcher == "torch" else len(self.devices)
        return tuple(number // max(1, here) for number in range(len(self.devices)))

    @property
    def own_devices(self) -> dict[int, torch.device]:
        """This process's devices by number."""
        return {number: self.devices[number] for number in self.own}
