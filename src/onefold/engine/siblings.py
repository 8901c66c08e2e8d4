"""Keeps the devices of one process alike: they follow the first, which the user's module shows."""

from __future__ import annotations

from collections.abc import Sequence

from onefold.engine.guard import Samples, Turns, ValueGuard
from onefold.engine.replica import Replica

__all__ = ["Siblings"]


class Siblings:
    """The first device of a process, and the others, which must have the same values.

    Args:
        replicas: the model on each device of this process.
        guard: remembers the parameters of the first one.
        turns: decides when costly checks are due.
    """

    def __init__(self, replicas: Sequence[Replica], guard: ValueGuard, turns: Turns) -> None:
        self._first, *self._others = replicas
        self._guard = guard
        self._turns = turns
        self._samples = [Samples([r.trained, r.other]) for r in self._others]

    def follow_first(self) -> None:
        """Bring what the user did to the model since the last step to the other devices."""
        # Buffers are few and change in most steps, so they are copied without looking; parameters
        # were brought by the exchange, and are copied only if somebody has written to them since.
        for replica in self._others:
            replica.buffers.begin_as(self._first.buffers)
        if self._others and (self._guard.changed() or self._differ()):
            self.copy_first()
            # Or what the script has changed would count as changed by the shards that run next.
            self._guard.note()

    def copy_first(self) -> None:
        """Copy the first device's parameters to the others of this process."""
        for replica in self._others:
            for mine, theirs in (
                (replica.trained, self._first.trained),
                (replica.other, self._first.other),
            ):
                for target, source in zip(mine.sections, theirs.sections, strict=True):
                    target.copy_(source)

    def _differ(self) -> bool:
        """Whether a device of this process has other values, as far as values are looked at."""
        due, first = self._turns.due, self._guard.samples
        # The guard keeps no values of a GPU, and cannot see what was changed there through .data.
        if not (due or first.on_host):
            return False
        here = first.add_up() if due else first.read()
        return any(here != (s.add_up() if due else s.read()) for s in self._samples)
