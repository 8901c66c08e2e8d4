"""Computes the shards of a step on a line of devices, each of which has some stages."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager

from onefold.core.batch import ShardedBatch
from onefold.engine.lineworker import LineWorker
from onefold.engine.passing import Passing
from onefold.engine.replica import Replica
from onefold.engine.shardtask import ShardTask
from onefold.exchange.exchange import Exchange

__all__ = ["Line"]


class Line:
    """The devices of this process in a line of all devices.

    Args:
        replicas: the model on each of them.
        attached: has the module compute on one of them.
        exchange: with all devices.
    """

    def __init__(
        self,
        replicas: Sequence[Replica],
        attached: Callable[[Replica], AbstractContextManager[object]],
        exchange: Exchange,
    ) -> None:
        self._replicas = replicas
        self._attached = attached
        self._exchange = exchange
        modules = replicas[0].stages
        assert modules is not None
        self._passings = [Passing(modules, replica.number) for replica in replicas]

    def run(self, batch: ShardedBatch, task: ShardTask) -> None:
        """Compute all shards of a step, and hand over what each stage gave.

        Raises:
            LineError: the model cannot be computed by a line of devices.
            LossError, GradientError, StateError: see `Replica.compute`.
            PeerError: another device is lost or has failed.
        """
        exchange = self._exchange
        relay, fold = exchange.relay, exchange.stages
        assert relay is not None
        assert fold is not None
        relay.clear()  # of a step that failed, and was survived
        fold.begin(shard for shard, size in enumerate(batch.sizes) if not size)
        workers = []
        for replica, passing in zip(self._replicas, self._passings, strict=True):
            exchange.board.clear_rows(replica.number, batch.plan.shards_of(replica.number))
            replica.begin(task)
            workers.append(LineWorker(replica, passing, self._attached, batch, task, exchange))
        while busy := [worker for worker in workers if not worker.is_done]:
            for worker in busy:
                while not worker.is_done and worker.can_go():
                    worker.go()
        relay.finish()
        for replica in self._replicas:
            replica.end()
