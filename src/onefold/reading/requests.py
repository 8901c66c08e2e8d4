"""The batches of a pass that are to be read, one after the other."""

from __future__ import annotations

from collections.abc import Sequence

from onefold.core.batch import DataPass
from onefold.core.shard import Plan
from onefold.reading.order import Order
from onefold.reading.reader import Request

__all__ = ["Requests"]


class Requests:
    """The batches of a pass that are to be read, one after the other; starts over if plans change.

    Note: a plan that changes while workers read ahead
    --------------------------------------------------
    A batch has the plan of the moment at which it is handed out, so that devices agree however far
    ahead each of them reads. If the plan has changed, the requests go back to the first batch that
    was not handed out, and the loader drops the answers to requests of an earlier turn. DataLoader
    draws another request for each answer that it receives, even if there was none left before: so
    ``__next__`` may continue after it has raised StopIteration.

    It does not refer to the loader: see the note on who keeps the workers alive.

    Args:
        this: the pass.
        order: the order of its samples.
        loader: number of the loader.
        plan: the plan for the first batch.
        own: numbers of this process's devices.
        digest: how many of the requests ask for a digest: 0, 1 (the first), or 2 for all of them.
    """

    def __init__(
        self,
        this: DataPass,
        order: Order,
        *,
        loader: int,
        plan: Plan,
        own: Sequence[int],
        digest: int,
    ) -> None:
        self.turn = 0
        """How often the plan has changed during this pass."""
        self._epoch, self._next, self._end = this.number, this.given, this.end
        self._order = order
        self._loader = loader
        self._plan = plan
        self._own = own
        self._digest = digest

    def __iter__(self) -> Requests:
        return self

    def __next__(self) -> Request:
        if self._next >= self._end:
            raise StopIteration
        start, self._next = self._next, min(self._order.stop(self._next), self._end)
        return self._request(start, self._next)

    def follow(self, plan: Plan, start: int) -> None:
        """Go back to place ``start`` of the pass if the plan has changed."""
        # The identity first: it settles nearly every step without comparing the counts.
        if plan is not self._plan and plan != self._plan:
            self.turn += 1
            self._plan, self._next = plan, start

    def _request(self, start: int, stop: int) -> Request:
        shards, starts, item = self._order.cut(start, stop, self._plan, self._own)
        digest = self._order.digest if self._digest else None
        # The data set is compared once in a pass; what is only known batch by batch, in each.
        self._digest = 2 if self._digest == 2 else 0
        return Request(
            self._loader,
            self._epoch,
            stop - start,
            stop,
            self._plan,
            self.turn,
            digest,
            shards,
            starts,
            item,
        )
