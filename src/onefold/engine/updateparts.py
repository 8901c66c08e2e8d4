"""An update that is made one part of the model after the other.

Where a model is updated stage by stage, the optimizer's ``step()`` is called once for each stage,
with the pieces of that stage in its groups: what it needs besides is there for one stage at a time.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

__all__ = ["Part", "parts_of"]


@dataclass(frozen=True, slots=True)
class Part:
    """What one call of ``step()`` updates."""

    places: Sequence[int]
    """Among the pieces of this process."""
    values: Sequence[torch.Tensor]
    """Of each of them."""
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
        return cls(places, [values[place] for place in places], divided)


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
