"""Refuses optimizers that draw random numbers while they update.

Each device updates its own spans, and draws for them from where its generators stand: all devices
the same numbers for other parameters, and as many as its spans need. Noise would repeat in the
model, and depend on how many devices there are.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext

import torch

from onefold.core.randomness import GeneratorStates
from onefold.engine.stephooks import steps_by_parameter
from onefold.errors import StateError
from onefold.reading.held import held_states

__all__ = ["UpdateDraws"]

_NOTHING = nullcontext()
_EVERY = 50
"""The first two updates of so many are looked at: reading all states takes 0.3 ms."""


class UpdateDraws:
    """Looks at the generators before and after some of the updates.

    Args:
        optimizers: that may draw; named in the error.
        devices: those of which the generators count as well, if they are GPUs.
    """

    def __init__(
        self, optimizers: Iterable[torch.optim.Optimizer], devices: Iterable[torch.device]
    ) -> None:
        self._optimizers = list(optimizers)
        self._devices = tuple(devices)
        self._updates = 0

    def watched(self) -> AbstractContextManager[None]:
        """A block in which the optimizer updates.

        Raises:
            StateError: random numbers were drawn in it.
        """
        self._updates += 1
        due = self._updates % _EVERY in (1, 2)
        return self._looked_at() if due and not steps_by_parameter(self._optimizers) else _NOTHING

    @contextmanager
    def _looked_at(self) -> Iterator[None]:
        before, held = GeneratorStates(*self._devices), held_states(self._optimizers)
        yield
        own = "" if held == held_states(self._optimizers) else "a generator of its own"
        if drawn := own or before.drawn_from():
            names = " or ".join(type(optimizer).__name__ for optimizer in self._optimizers)
            raise StateError(
                f"{names} draws random numbers in step(), from {drawn}: expected none, as "
                f"each device updates a part of the model, and would draw the same numbers for "
                f"other parameters. Train with Trainer(model, None, ...) and trainer.gradient, and "
                f"have the optimizer update in trainer.changing(), where the lead's draws count"
            )
