"""How a batch is cut into shards, and which device runs which. Pure: no tensors, no devices."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from itertools import pairwise

__all__ = ["Plan", "cut_bounds", "runs_of"]


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


@lru_cache(maxsize=1024)
def runs_of(numbers: Sequence[int]) -> tuple[slice, ...]:
    """Where numbers in ascending order lie in a table: one slice for each row of neighbours.

    >>> runs_of((0, 1, 2, 5))
    (slice(0, 3, None), slice(5, 6, None))
    """
    starts = [n for place, n in enumerate(numbers) if not place or numbers[place - 1] != n - 1]
    stops = [n + 1 for n in numbers if n + 1 not in numbers]
    return tuple(map(slice, starts, stops))


@dataclass(frozen=True, slots=True)
class Plan:
    """Which device runs which shards: ``counts[d]`` for device ``d``, in device order.

    A device's shards are neighbours, so that it can add up most of them by itself. In rounds they
    are not: all devices take the next shards one after the other, and what is added up of a round
    is one row of neighbours.

    >>> Plan.even(shards=7, devices=3).counts
    (3, 2, 2)
    >>> Plan((1, 0, 3)).shards_of(2)
    range(1, 4)
    >>> Plan((3, 1), in_rounds=True).shards_of(0)
    (0, 2, 3)
    """

    counts: tuple[int, ...]
    """Number of shards of each device; a device with none merely updates its span."""
    in_rounds: bool = False
    """Whether the devices take the shards in turn."""
    line: int = 1
    """How many devices compute a shard together, the one that has it and those after it."""
    shards: int = field(init=False, repr=False, compare=False)
    """How many shards every batch is cut into (V)."""

    def __post_init__(self) -> None:
        # Once, as it is asked for many times in a step.
        object.__setattr__(self, "shards", sum(self.counts))
        if not self.counts or any(count < 0 for count in self.counts) or not sum(self.counts):
            raise ValueError(
                f"a plan gives every device zero or more shards, at least one in all; "
                f"got {self.counts}"
            )
        if any(count for device, count in enumerate(self.counts) if device % self.line):
            raise ValueError(
                f"a plan gives shards to the first device of each line of {self.line}; "
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
    def in_lines(cls, *, shards: int, devices: int, line: int) -> Plan:
        """Have the devices of each line compute shards together: the first one of it has them.

        Raises:
            ValueError: there are more lines than shards.

        >>> Plan.in_lines(shards=4, devices=2, line=2).read_by(1)
        (0, 1, 2, 3)
        >>> Plan.in_lines(shards=5, devices=4, line=2).counts
        (3, 0, 2, 0)
        """
        lines = devices // line
        if lines > shards:
            raise ValueError(
                f"{lines} lines of devices cannot share {shards} shards: a shard is never divided. "
                f"Use at most {shards} lines, or give Trainer more shards"
            )
        counts = [0] * devices
        counts[::line] = [stop - start for start, stop in cut_bounds(shards, lines)]
        return cls(tuple(counts), in_rounds=True, line=line)

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
    def devices(self) -> int:
        """The number of devices that take part."""
        return len(self.counts)

    def shards_of(self, device: int) -> Sequence[int]:
        """The shards that ``device`` runs, in ascending order."""
        if self.in_rounds:
            return tuple(row[device] for row in self.rounds() if device in row)
        start = sum(self.counts[:device])
        return range(start, start + self.counts[device])

    def read_by(self, device: int) -> Sequence[int]:
        """The shards of which ``device`` needs the samples: its own, or those of its line."""
        return self.shards_of(device // self.line * self.line)

    def column_of(self, device: int) -> range:
        """The devices that compute the same as ``device``, one in each line.

        >>> list(Plan.in_lines(shards=4, devices=6, line=2).column_of(3))
        [1, 3, 5]
        """
        return range(device % self.line, self.devices, self.line)

    def in_a_row(self) -> Plan:
        """Make the plan in which each device's shards are neighbours, and it has them for itself.

        The counts are the same, except of lines: what goes through those is shared out evenly.
        """
        if self.line == 1:
            return Plan(self.counts)
        return Plan(tuple(stop - start for start, stop in cut_bounds(self.shards, self.devices)))

    def rounds(self) -> tuple[Mapping[int, int], ...]:
        """What runs at the same time: for each round the shard of every device that has one.

        >>> Plan((3, 1), in_rounds=True).rounds()
        ({0: 0, 1: 1}, {0: 2}, {0: 3})
        """
        return _rounds(self)


@lru_cache(maxsize=64)
def _rounds(plan: Plan) -> tuple[Mapping[int, int], ...]:
    rows: list[dict[int, int]] = []
    shard = 0
    for turn in range(max(plan.counts)):
        devices = [device for device, count in enumerate(plan.counts) if count > turn]
        if plan.in_rounds:
            rows.append({device: shard + place for place, device in enumerate(devices)})
        else:
            rows.append({device: sum(plan.counts[:device]) + turn for device in devices})
        shard += len(devices)
    return tuple(rows)
