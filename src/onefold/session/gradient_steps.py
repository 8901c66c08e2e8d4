"""Tells which calls of `Trainer.gradient` belong to one step.

Line searches and two-pass optimizers ask for several gradients of one batch before they update
once. These calls are one step: they have one number, and so the same random numbers, and the batch
counts as used once. A step lasts as long as the very same batch object is given; one that was
given inside of `Trainer.modifying` ends with that block, so that a script may take the same batch
(all of its data, say) for the next step.
"""

from __future__ import annotations

import logging
from typing import NamedTuple

from onefold.core.assignment import Devices

__all__ = ["GradientSteps", "Place"]

_log = logging.getLogger("onefold")

_MOST_BLOCKS = 4
"""Blocks of changes that one step may well have; of two-pass optimizers it has two."""


class Place(NamedTuple):
    """Where in a script a gradient is asked for."""

    step: int
    """How many steps are done."""
    block: int
    """Number of the block of changes that the script is in; 0 outside of any."""
    blocks: int
    """How many blocks it has opened so far."""


class GradientSteps:
    """Remembers the batch of the last gradient, and where it was given.

    Args:
        devices: who takes part; the lead alone warns.
    """

    def __init__(self, devices: Devices) -> None:
        self._devices, self._warned = devices, False
        self.forget()

    def forget(self) -> None:
        """Have the next call begin a step, whatever its batch is."""
        self._batch: object = None
        self._loss = ""
        self._last = Place(-1, 0, 0)
        self._blocks_before = 0

    def goes_on(self, batch: object, place: Place, loss: str) -> bool:
        """Whether a call belongs to the step of the call before it.

        Outside of a block another loss begins another step.

        Raises:
            RuntimeError: it is in the same block as that call, and has another batch.
        """
        last, same = self._last, batch is self._batch
        if place.block and place.block == last.block and not same:
            raise RuntimeError(
                "trainer.gradient was called with two batches in one block of `with "
                "trainer.modifying():`, which is one step: expected the very same object in all "
                "calls. Make it before the block (batch = (x, y), not gradient((x, y)) in a "
                "closure), and a block for each batch"
            )
        if not same or place.step != last.step or last.block not in (0, place.block):
            return False
        if loss != self._loss and not place.block:
            return False
        if (
            place.blocks - self._blocks_before > _MOST_BLOCKS
            and not self._warned
            and self._devices.has_lead
        ):
            self._warned = True
            _log.warning(
                "trainer.gradient has been given the same batch object again, after more than %d "
                "blocks of trainer.modifying: all of it counts as one step, with the same random "
                "numbers. For the next step give a new object, such as (x, y) made in the loop, or "
                "call gradient inside the block, whose end is the step's",
                _MOST_BLOCKS,
            )
        return True

    def note(self, batch: object, place: Place, loss: str, *, begins: bool) -> None:
        """Note a call that has succeeded, and whether it began a step, which is done by now."""
        if begins:
            self._blocks_before = place.blocks
        self._batch, self._last = batch, place._replace(step=place.step + begins)
        self._loss = loss
