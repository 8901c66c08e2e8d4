"""Reads the settings of an optimizer's groups, as one number that devices can compare."""

from __future__ import annotations

from typing import Any

import torch

from onefold.core.head import checksum
from onefold.core.jsonvalue import from_json, to_json

__all__ = ["GroupSettings"]

_KEPT = ("params", "param_names")
"""Keys of a group that belong to each process itself."""


class GroupSettings:
    """Reads the settings of an optimizer's groups; quick where they have not changed.

    Args:
        optimizer: the user's own.
    """

    def __init__(self, optimizer: torch.optim.Optimizer) -> None:
        self._optimizer = optimizer
        self._last: list[Any] = []
        self._checksum = 0

    def checksum(self, *, due: bool = True) -> int:
        """Compute a checksum of all settings but the parameters.

        Args:
            due: whether to read numbers that lie on a GPU as well, which waits for it.
        """
        # Comparing the values costs far less in every step than writing them out as text.
        now = [
            value if not isinstance(value, torch.Tensor) else _number(value, due=due)
            for group in self._optimizer.param_groups
            for key, value in group.items()
            if key != "params"
        ]
        if now != self._last:
            self._last = now
            self._checksum = checksum(repr(now).encode())
        return self._checksum

    def as_json(self) -> list[dict[str, Any]]:
        """Return the settings that a script may change, for other devices to adopt."""
        return [
            {
                key: to_json(value, f"{key} of the optimizer's group {number}")
                for key, value in group.items()
                if key not in _KEPT
            }
            for number, group in enumerate(self._optimizer.param_groups)
        ]

    def adopt(self, settings: list[dict[str, Any]]) -> None:
        """Adopt what `as_json` returned on another device; tensors keep their identity."""
        for group, values in zip(self._optimizer.param_groups, settings, strict=True):
            for key, value in values.items():
                came, here = from_json(value), group.get(key)
                # In place: a schedule, or a captured graph, holds the very tensor.
                if isinstance(came, torch.Tensor) and isinstance(here, torch.Tensor):
                    here.copy_(came)
                else:
                    group[key] = came


def _number(value: torch.Tensor, *, due: bool) -> object:
    return value.tolist() if due or value.device.type == "cpu" else "on a device"
