"""A record of all devices of a run, and of those that this process drives."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from onefold.core.world import World

__all__ = ["Team"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Team:
    """All devices of the run, and which of them this process drives."""

    devices: tuple[torch.device, ...]
    """All devices, in the order of their numbers."""
    own: tuple[int, ...]
    """Numbers of the devices that this process drives."""
    world: World
    """How this process was started."""
    trainer: int
    """Number of the trainer among those of the script, counted from 0."""

    @property
    def hosts(self) -> tuple[int, ...]:
        """For each device, the number of its host; the ranks of one host are consecutive."""
        # Only torchrun spans several hosts; every other launch has all devices on this one.
        here = self.world.local_size if self.world.launcher == "torch" else len(self.devices)
        return tuple(number // max(1, here) for number in range(len(self.devices)))

    @property
    def has_lead(self) -> bool:
        """Whether this process drives device 0, which is the lead: it speaks for all of them."""
        return 0 in self.own

    @property
    def own_devices(self) -> dict[int, torch.device]:
        """This process's devices by number."""
        return {number: self.devices[number] for number in self.own}
