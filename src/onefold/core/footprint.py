"""What a model takes of memory, by what devices keep of it. Pure.

Activations, and what PyTorch takes for itself, come on top: nobody knows them before a step.
"""

from __future__ import annotations

from dataclasses import dataclass

__all__ = ["Footprint"]

_OF_A_STAGE = 4
"""Gradients of the largest stage that a device may hold while they are handed over: what backward
made, what comes in two boxes, what is sent."""
_STAGES_AT_HAND = 2
"""Stages of which a device has the parameters at one time, where others keep them."""


@dataclass(frozen=True, slots=True)
class Footprint:
    """Sizes in bytes, of the whole model.

    >>> sizes = Footprint(parameters=100, other=0, gradients=100, state=200, stage=5, shards=8)
    >>> sizes.keeping_all(1, together=True), sizes.keeping_all(4, together=True)
    (700, 375)
    >>> sizes.keeping_span(4, together=True), sizes.keeping_span(4, together=False)
    (145, 155)
    >>> sizes.keeping_stages(4, 30, together=True), sizes.on_disk
    (205, 700)
    >>> sizes.keeping_nothing(together=True), sizes.keeping_nothing(together=False)
    (20, 30)
    """

    parameters: int
    """Those that are trained."""
    other: int
    """Frozen parameters, but those in `frozen`, and buffers."""
    gradients: int
    """One gradient for each trained parameter, in the dtype in which they are added up."""
    state: int
    """What the optimizer keeps, masters of parameters in low precision with it."""
    stage: int
    """The gradients of the largest stage."""
    shards: int
    frozen: int = 0
    """Frozen parameters that lie in stages."""
    frozen_stage: int = 0
    """Those of the stage that has most of them."""

    def keeping_all(self, devices: int, *, together: bool) -> int:
        """Of each of so many devices; ``together`` if all of them use the same parameters."""
        # What backward makes, a sum for each level of the tree of a device's shards, and what is
        # handed to others.
        held = 1 + self._levels(self._shards_of(devices)) + (devices > 1)
        own = self.gradients * held + self.state // devices
        return own + self._values(devices, together=together)

    def keeping_span(self, devices: int, *, together: bool) -> int:
        """The same for devices that keep their spans, of parameters as well if not ``together``."""
        sums = self.gradients * (1 + self._levels(self._shards_of(devices)))
        own = (sums + self.state) // devices + _OF_A_STAGE * self.stage
        if together or devices == 1:
            return own + self._values(devices, together=together)
        kept = (self.parameters + self.frozen) // devices + self.other
        return own + kept + _STAGES_AT_HAND * (self.stage + self.frozen_stage)

    def keeping_stages(self, devices: int, share: int, *, together: bool) -> int:
        """The same for devices of one line, of which one has at most these bytes of gradients."""
        state = self.state * share // max(self.gradients, 1)
        sums = share * (1 + self._levels(self.shards))
        return sums + state + self._values(devices, together=together)

    def keeping_nothing(self, *, together: bool) -> int:
        """The same for devices whose model is in a file, or, if not ``together``, is brought."""
        needed = _OF_A_STAGE * self.stage
        if together:
            return needed
        return needed + self.other + _STAGES_AT_HAND * (self.stage + self.frozen_stage)

    @property
    def on_disk(self) -> int:
        """Of that file."""
        sums = self.gradients * (1 + self._levels(self.shards))
        return self.parameters + self.frozen + self.other + self.state + sums

    def _values(self, devices: int, *, together: bool) -> int:
        return (self.parameters + self.frozen + self.other) // (devices if together else 1)

    def _shards_of(self, devices: int) -> int:
        return -(-self.shards // devices)

    @staticmethod
    def _levels(count: int) -> int:
        return (count - 1).bit_length()
