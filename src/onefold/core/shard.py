"""How a batch is cut into shards, and which device runs which. Pure: no tensors, no devices."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from itertools import pairwise

__all__ = ["Plan", "cut_bounds"]


@lru_cache(maxsize=64)
def cut_bounds(samples: int, shards: int) -> tuple[tuple[int, int], ...]:
    """First and past-the-last sample of every shard, cut as ``torch.tensor_split`` cuts.

    The first ``samples % shards`` shards hold one sample more than the others; with fewer samples
    than shards the last ones are empty.

    >>> cut_bounds(7, 3)
    ((0, 3), (3, 5), (5, 7))
    """
    if samples < 0 or shards < 1:
        raise ValueError(f"expected samples >= 0 and shards >= 1, got {samples} and {shards}")
    size, longer = divmod(samples, shards)
    starts = [shard * size + min(shard, longer) for shard in range(shards + 1)]
    return tuple(pairwise(starts))


@dataclass(frozen=True, slots=True)
class Plan:
    """Which device runs which shards: ``counts[d]`` for device ``d``, contiguous, in device order.

    >>> Plan.even(shards=7, devices=3).counts
    (3, 2, 2)
    >>> Plan((1, 0, 3)).shards_of(2)
    range(1, 4)
    """

    counts: tuple[int, ...]
    """Number of shards of each device; a device with none merely updates its span."""

    def __post_init__(self) -> None:
        if not self.counts or any(count < 0 for count in self.counts) or not sum(self.counts):
            raise ValueError(
                f"a plan gives every device zero or more shards, at least one in all; "
                f"got {self.counts}"
            )

    @classmethod
    def even(cls, *, shards: int, devices: int) -> Plan:
        """Share the shards out evenly: the devices' shares differ by one shard at most.

        Raises:
            ValueError: there are more devices than shards.
        """
        if not 1 <= devices <= shards:
            raise ValueError(
                f"{devices} devices cannot share {shards} shards: a shard is never divided. "
                f"Use at most {shards} devices, or give Trainer more shards"
            )
        return cls(tuple(stop - start for start, stop in cut_bounds(shards, devices)))

    @classmethod
    def given(cls, counts: Sequence[int], *, shards: int, devices: int) -> Plan:
        """Make a plan from counts that a user wrote down, checked against the run.

        Raises:
            ValueError: the counts are for a different number of devices, or add up to a different
                number of shards.
        """
        plan = cls(tuple(int(count) for count in counts))
        if len(plan.counts) != devices or plan.shards != shards:
            raise ValueError(
                f"the plan {plan.counts} has {len(plan.counts)} devices and {plan.shards} shards; "
                f"this run has {devices} devices and {shards} shards"
            )
        return plan

    @property
    def shards(self) -> int:
        """How many shards every batch is cut into (V)."""
        return sum(self.counts)

    @property
    def devices(self) -> int:
        """The number of devices that take part."""
        return len(self.counts)

    def shards_of(self, device: int) -> range:
        """The contiguous range of shards that ``device`` runs."""
        # Contiguous, so that a device can add up most of its shards by itself: see
        # `onefold.core.fold`.
        start = sum(self.counts[:device])
        return range(start, start + self.counts[device])
