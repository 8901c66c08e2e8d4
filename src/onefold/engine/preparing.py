"""Finds out what the shards of a step must know of each other before their backward can begin."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from dataclasses import replace

from onefold.core.batch import ShardedBatch
from onefold.core.result import ShardResult
from onefold.engine.divisors import trade_divisors
from onefold.engine.objective import Objective
from onefold.engine.replica import Replica, ShardTask
from onefold.engine.together import Together
from onefold.exchange.exchange import Exchange

__all__ = ["Preparing"]


class Preparing:
    """Prepares the steps of losses that gather, or that have several terms.

    Args:
        replicas: the model on each device of this process.
        exchange: with all devices.
        attached: has the module compute on one of them.
    """

    def __init__(
        self,
        replicas: Sequence[Replica],
        exchange: Exchange,
        attached: Callable[[Replica], AbstractContextManager[object]],
    ) -> None:
        self._replicas = replicas
        self._exchange = exchange
        self._attached = attached
        self._together = Together(replicas, exchange)
        self.spoilt = self._together.spoilt

    def prepared(
        self, objective: Objective, batch: ShardedBatch, task: ShardTask
    ) -> tuple[ShardTask, dict[int, ShardResult]]:
        """Complete the task of a step; called on all devices.

        Returns:
            The task with which shards can run one by one; and the results of those that have
            run already.

        Raises:
            LossError: shards do not gather alike, or have different numbers of terms.
        """
        if task.is_plain(batch):
            return task, {}
        if objective.gathers:
            return self._together.prepare(batch, task)
        if objective.several_terms:
            task = replace(task, divisors=self._divisors(batch, task))
        return task, {}

    def _divisors(self, batch: ShardedBatch, task: ShardTask) -> tuple[float, ...] | None:
        """Find the whole batch's weight of each term of the loss; None if it has one term."""
        found = {}
        for replica in self._replicas:
            with self._attached(replica):
                found[replica.number] = replica.weigh_shards(batch, task)
        return trade_divisors(self._exchange, batch, found, self._replicas, task.step)
