"""An update that is made one part of the model after the other.

Note: one step, several calls
-----------------------------
Where a model is updated stage by stage, the optimizer's ``step()`` is called once for each stage,
with the pieces of that stage in its groups. What it keeps for each parameter goes on as ever. What
it keeps in its groups, such as a count of steps, is put back before each further call, so that it
counts once; and every call must come to the same, as nothing else would be right for all of them.
"""

from __future__ import annotations

import copy
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch

from onefold.errors import StateError

__all__ = ["Part", "RepeatedCalls", "parts_of"]

_HELD = ("params", "param_names")


@dataclass(frozen=True, slots=True)
class Part:
    """What one call of ``step()`` updates."""

    places: Sequence[int]
    """Among the pieces of this process."""
    divided: Sequence[Sequence[torch.Tensor]]
    """For each group of the optimizer, the values of those that lie in it."""

    @classmethod
    def of(
        cls,
        places: Sequence[int],
        values: Sequence[torch.Tensor],
        groups: Sequence[int],
        count: int,
    ) -> Part:
        """Divide some of the pieces among the groups.

        Args:
            places: of these pieces.
            values: of all pieces of this process.
            groups: for each of them, the number of its group.
            count: how many groups there are.
        """
        divided: list[list[torch.Tensor]] = [[] for _ in range(count)]
        for place in places:
            divided[groups[place]].append(values[place])
        return cls(places, divided)


def parts_of(
    values: Sequence[torch.Tensor], groups: Sequence[int], count: int, stages: Sequence[int]
) -> list[Part]:
    """Cut an update into one part for each stage; at least one, though it may be empty.

    Args:
        values: of all pieces of this process.
        groups: for each of them, the number of its group.
        count: how many groups there are.
        stages: for each of them, the number of its stage.
    """
    found: dict[int, list[int]] = {}
    for place, stage in enumerate(stages):
        found.setdefault(stage, []).append(place)
    return [Part.of(places, values, groups, count) for places in found.values() or [[]]]


class RepeatedCalls:
    """The calls of one step.

    Args:
        optimizer: the user's own.
    """

    def __init__(self, optimizer: torch.optim.Optimizer) -> None:
        self._optimizer = optimizer
        self._before = self._read()
        self._after: list[dict[str, Any]] | None = None

    def begin_call(self) -> None:
        """Have the groups be as before the step."""
        if self._after is not None:
            for group, before in zip(self._optimizer.param_groups, self._before, strict=True):
                group.update(copy.deepcopy(before))

    def end_call(self) -> None:
        """Compare what the groups are now with what the first call has made of them.

        Raises:
            StateError: it differs, or the optimizer keeps state for the model as a whole.
        """
        name = type(self._optimizer).__name__
        loose = [key for key in self._optimizer.state if not isinstance(key, torch.Tensor)]
        if loose:
            raise StateError(
                f"{name} keeps {', '.join(map(repr, loose))} in its state, under no parameter: it "
                f"cannot be called for one stage after the other, as keep=host does. Use "
                f"--keep span, or an optimizer whose state is all by parameter"
            )
        after = self._read()
        if self._after is None:
            self._after = after
        for number, (first, now) in enumerate(zip(self._after, after, strict=True)):
            for key in first.keys() | now.keys():
                if not _equal(first.get(key), now.get(key)):
                    raise StateError(
                        f"{name} made group {number}[{key!r}] {first.get(key)!r} for one stage of "
                        f"the model and {now.get(key)!r} for another: it cannot be called for one "
                        f"stage after the other, as keep=host does. Use --keep span"
                    )

    def _read(self) -> list[dict[str, Any]]:
        return [
            {key: copy.deepcopy(value) for key, value in group.items() if key not in _HELD}
            for group in self._optimizer.param_groups
        ]


def _equal(one: object, other: object) -> bool:
    if isinstance(one, torch.Tensor) and isinstance(other, torch.Tensor):
        return one.shape == other.shape and bool(torch.equal(one, other))
    return bool(one == other)
