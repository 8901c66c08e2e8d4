"""Reads and restores the modes of a module's parts, and watches numbers that scripts change."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch

from onefold.core.head import checksum

__all__ = ["Modes", "in_mode"]


_NUMBERS = ("p", "momentum", "eps", "dropout")
"""Settings of PyTorch's layers that schedules of a script change between steps."""


class Modes:
    """Reads the modes of a module's parts, and puts them back.

    Args:
        module: the user's own; its parts are listed once, and again at `refresh`.
    """

    def __init__(self, module: torch.nn.Module) -> None:
        self._module = module
        self._last: list[object] = []
        self._checksum = 0
        self.refresh()

    def refresh(self) -> None:
        """List the parts anew."""
        # Walking the module tree takes longer than all that is done with the list in a step.
        self._parts = list(self._module.modules())
        # Only PyTorch's own layers: in a user's module a number of such a name may mean anything,
        # and change with every call.
        self._numbers = [
            (part.__dict__, name)
            for part in self._parts
            if type(part).__module__.startswith("torch.nn.")
            for name in _NUMBERS
            if isinstance(part.__dict__.get(name), int | float)
        ]

    def numbers_checksum(self) -> int:
        """Compute a checksum of the layers' settings, such as the ``p`` of dropout.

        Quick where they have not changed since the last time.
        """
        now = [held.get(name) for held, name in self._numbers]
        if now != self._last:
            self._last = now
            self._checksum = checksum(repr(now).encode())
        return self._checksum

    def read(self) -> bytes:
        """Return one byte per part: 1 for training mode."""
        return bytes([part.training for part in self._parts])

    def restore(self, modes: bytes) -> None:
        """Give every part the mode that `read` found."""
        if self.read() != modes:
            for part, mode in zip(self._parts, modes, strict=True):
                # The flag itself: train() would go on to the children, which have their own bytes.
                part.training = bool(mode)


@contextmanager
def in_mode(module: torch.nn.Module, *, training: bool) -> Iterator[None]:
    """Put a module into one mode; afterwards each part has its own mode again."""
    # Listed here and not taken from `Modes`: parts may have been added since, and all must return.
    parts = list(module.modules())
    before = [part.training for part in parts]
    # A part with a train() of its own may do more than set the flag (merge weights, for instance),
    # so it is called even where all flags are right already.
    if not all(part.training is training and _is_plain(part) for part in parts):
        module.train() if training else module.eval()
    try:
        yield
    finally:
        # What such a part did in eval() it undoes in a train() of its own (weights that were merged
        # are taken apart again). It goes on to its children, which come later in the list.
        for part, mode in zip(parts, before, strict=True):
            if part.training is not mode and not _is_plain(part):
                part.train(mode)
        # Flag by flag: module.train() would reach parts that the user keeps in evaluation mode.
        for part, mode in zip(parts, before, strict=True):
            if part.training is not mode:
                part.training = mode


def _is_plain(module: torch.nn.Module) -> bool:
    """Whether setting a module's mode sets the flag and nothing else."""
    return type(module).train is torch.nn.Module.train and "train" not in module.__dict__
