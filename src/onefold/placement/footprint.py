"""Sizes of a model, used by placements to estimate the memory of a device before a run.

Activations and PyTorch itself are not included: their size is unknown before the first step.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

__all__ = ["Footprint"]


@dataclass(frozen=True, slots=True)
class Footprint:
    """Sizes of a model, in bytes.

    >>> from onefold.placement.partitioned import Offloaded
    >>> from onefold.placement.partitioned import Partitioned
    >>> from onefold.placement.pipeline.placement import Pipelined
    >>> from onefold.placement.replicated import Replicated
    >>> sizes = Footprint(
    ...     parameters=100,
    ...     other=0,
    ...     gradients=100,
    ...     state=200,
    ...     shards=8,
    ...     stage_gradients=(5, 25, 25, 25, 20),
    ...     stage_values=(5, 25, 25, 25, 20),
    ... )
    >>> Replicated.estimate(sizes, 4, together=True)
    {'replicate': 375, 'replicate:state': 375}
    >>> Replicated.estimate(sizes, 2, together=False)
    {'replicate': 650, 'replicate:state': 800}
    >>> Partitioned.estimate(sizes, 4, together=True)
    {'partition': 225}
    >>> Partitioned.estimate(sizes, 4, together=False)
    {'partition': 263}
    >>> Pipelined.estimate(sizes, 4, together=True)
    {'pipeline': 205}
    >>> Offloaded.estimate(sizes, 4, together=True)
    {'offload': 100, 'offload:file': 700}
    """

    EXCHANGED: ClassVar[int] = 4
    """Gradients of the largest stage that a device may hold during an exchange: those that backward
    made, two received ones, and one that is being sent."""
    RESIDENT: ClassVar[int] = 2
    """Stages whose parameters a device holds at a time, if other devices keep them; or stages whose
    gradients it holds, if it sends them early."""

    parameters: int
    """Trained parameters."""
    other: int
    """Buffers, and frozen parameters outside stages."""
    gradients: int
    """One gradient for each trained parameter, in the dtype in which gradients are summed."""
    state: int
    """Optimizer state, including masters of parameters in low precision."""
    shards: int
    """Number of shards per batch."""
    stage_gradients: Sequence[int]
    """Gradients of each stage, starting with the part outside all stages."""
    stage_values: Sequence[int]
    """Trained and frozen parameters of each stage, in the same order."""
    scratch: int = 0
    """Temporary memory of the optimizer, on a device with separate memory."""
    frozen: int = 0
    """Frozen parameters in stages."""
    sent: int = 0
    """Gradients of the largest stage that is sent during backward; 0 if none is."""
    uneven: frozenset[int] = frozenset()
    """Device counts for which the stages cannot be partitioned evenly."""
    frozen_stage: int = 0
    """Maximum bytes of frozen parameters in a stage."""

    @property
    def stage(self) -> int:
        """Gradients of the largest stage."""
        return max(self.stage_gradients)

    def values(self, devices: int, *, together: bool) -> int:
        """Return the parameters and buffers of a device with all; ``together`` if devices share
        them."""
        return (self.parameters + self.frozen + self.other) // (devices if together else 1)

    def levels(self, devices: int = 1) -> int:
        """Return the depth of the tree of a device's shards, without its leaves."""
        return (-(-self.shards // devices) - 1).bit_length()

    def in_transit(self, devices: int, *, begun: bool) -> int:
        """Return the bytes of stages that devices without shared memory exchange.

        A device needs no memory for its own part of the two received gradients. In the first round
        (not ``begun``) there is no sum yet.
        """
        gradients = 7 * self.stage - (2 if begun else 5) * self.stage // devices
        return gradients + self.RESIDENT * self.frozen_stage
