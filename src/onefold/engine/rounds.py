"""Computes the shards of this process's devices in rounds, and hands over what each stage gave."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack
from dataclasses import replace

from onefold.core.batch import ShardedBatch
from onefold.core.result import ShardResult
from onefold.engine.replica import Replica, ShardTask
from onefold.exchange.carrier import Gift
from onefold.exchange.exchange import Exchange
from onefold.exchange.stagefold import StageFold

__all__ = ["run_rounds"]


def run_rounds(
    replicas: Sequence[Replica],
    attached: Callable[[Replica], AbstractContextManager[object]],
    before: Callable[[Replica], AbstractContextManager[object]],
    batch: ShardedBatch,
    task: ShardTask,
    exchange: Exchange,
    done: Mapping[int, ShardResult],
    early: bool,
) -> None:
    """Compute the shards of all devices of this process, one of each device in every round.

    Args:
        replicas: those of this process.
        attached: has the module compute on one of them.
        before: surrounds all shards of one of them.
        batch: the step's.
        task: the step's.
        exchange: with all devices; takes gradients by stages.
        done: the results of shards that have run already.
        early: whether each stage is handed over as soon as it is complete, and not after the shard.

    Raises:
        LossError, GradientError, StateError: see `Replica.compute`.
        PeerError: another device is lost or has failed.
    """
    board, fold = exchange.board, exchange.stages
    assert fold is not None
    fold.begin(shard for shard, size in enumerate(batch.sizes) if not size)
    task = replace(task, give=fold.give if early else None)
    with ExitStack() as surrounding:
        for replica in replicas:
            board.clear_rows(replica.number, batch.plan.shards_of(replica.number))
            replica.begin(task)
            with attached(replica):
                surrounding.enter_context(before(replica))
        for row in batch.plan.rounds():
            for replica in replicas:
                shard = row.get(replica.number, -1)
                if shard not in batch.shards:
                    continue
                found = done.get(shard)
                if found is None:
                    with attached(replica):
                        found = replica.compute(shard, batch, task)
                if found.gradients:
                    _give_all(fold, shard, found)
                board.record(replica.number, shard, found)
            fold.end_round()
    for replica in replicas:
        replica.end()


def _give_all(fold: StageFold, shard: int, result: ShardResult) -> None:
    """Hand over the gradients of a shard that has kept them."""
    for stage, numbers in reversed(list(enumerate(fold.stages.entries))):
        fold.give(Gift(shard, stage, True, [result.gradients[number] for number in numbers]))
