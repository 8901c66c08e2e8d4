"""One device's share of a step: runs its shards, adds up inside its blocks, hands the sums over.

`run_rounds` does so where devices hand gradients over stage by stage, and `Line` in a pipeline.

Note: the order of addition in blocks
-------------------------------------
A device's shards are a row of whole blocks of the fold's tree (see `onefold.core.fold`). Inside a
block gradients are added as they come: the left half is finished and kept before the right half is
begun, so a device holds at most one partial sum for each level of the tree, however many shards it
runs. Two blocks of one device are never added here, although they are neighbours: they are not the
halves of one node, or they would be one block. The owners of the spans add each in its place.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack
from dataclasses import replace

import torch

from onefold.core.batch import ShardedBatch
from onefold.core.fold import Block, blocks_of, fold
from onefold.core.stages import ROOT, Stages, waiting
from onefold.core.values import ShardResult
from onefold.engine.gradients import Gradients, add_gradients
from onefold.engine.kernels import Compilers
from onefold.engine.lentparameter import Lending
from onefold.engine.lineworker import LineWorker
from onefold.engine.passing import Passing
from onefold.engine.replica import Replica
from onefold.engine.shardtask import ShardTask
from onefold.exchange.carrier import Gift
from onefold.exchange.exchange import Exchange
from onefold.exchange.stagefold import StageFold

__all__ = ["line_of", "partial_sums", "run_rounds", "run_share"]

_log = logging.getLogger("onefold")


def run_share(
    replica: Replica,
    batch: ShardedBatch,
    task: ShardTask,
    exchange: Exchange,
    done: Mapping[int, ShardResult] | None = None,
) -> Gradients:
    """Compute a device's shards, fill its rows of the board and publish one partial sum per block.

    Args:
        replica: the model on the device.
        batch: the step's.
        task: the step's.
        exchange: with all devices.
        done: the results of shards that have run already; their gradients are added to in place.

    Returns:
        The gradients of the last block. With one shard in all, these are the whole batch's.

    Raises:
        LossError: the loss function returned something that is not a loss.
        GradientError: a gradient is sparse, belongs to an inner backward, or is a tensor that a
            hook has handed over twice.
    """
    device, board, watch = replica.number, exchange.board, replica.watch

    def record(shard: int, result: ShardResult) -> None:
        board.record(device, shard, result)

    # Only our own rows: the others' may be full of this step's results already. An empty shard
    # records nothing, so that without this its row would still hold the step before.
    board.clear_rows(device, batch.plan.shards_of(device))
    replica.begin(task)
    gradients: Gradients = []
    for slot, gradients in enumerate(partial_sums(replica, batch, task, record, done)):
        start = watch.now()
        # From here until `spread` these tensors belong to the exchange, which adds to them in
        # place. A single shard's are added to nothing, so that `Engine._clip` may still read them.
        exchange.publish(device, slot, gradients)
        watch.note("exchange", "publish", start)
    replica.end()
    return gradients


def partial_sums(
    replica: Replica,
    batch: ShardedBatch,
    task: ShardTask,
    record: Callable[[int, ShardResult], None],
    done: Mapping[int, ShardResult] | None = None,
) -> Iterator[Gradients]:
    """Compute a device's shards, and add up the gradients of each block.

    Args:
        replica: has begun the step.
        batch: the step's.
        task: the step's.
        record: called with the number and the result of each shard that has samples.
        done: the results of shards that have run already.
    """

    def leaf(node: Block) -> Gradients | None:
        if node.stop - node.start > 1:
            # Not a shard: `fold` then asks for its halves, the left one first.
            return None
        if node.start not in batch.shards:
            # An empty shard stays in the tree and adds nothing: the tree depends on V alone.
            return replica.nothing
        computed = (done or {}).get(node.start)
        result = computed or replica.compute(node.start, batch, task)
        record(node.start, result)
        return result.gradients

    for block in blocks_of(batch.plan.shards_of(replica.number), batch.plan.shards):
        yield fold(leaf, block, add_gradients)


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


class Line:
    """The devices of this process in a line of all devices.

    Args:
        replicas: the model on each of them.
        attached: has the module compute on one of them.
        exchange: with all devices.
        lending: has the parameters of a device's stages there.
    """

    def __init__(
        self,
        replicas: Sequence[Replica],
        attached: Callable[[Replica], AbstractContextManager[object]],
        exchange: Exchange,
        lending: Lending,
    ) -> None:
        self._replicas = replicas
        self._attached = attached
        self._exchange = exchange
        self._lending = lending
        modules = replicas[0].stages
        assert modules is not None
        stages = modules.stages
        self._passings = [Passing(modules, n.number % stages.line, lending) for n in replicas]
        if replicas[0].number == 0:
            shape = exchange.board.shape
            _tell(stages, shape.devices // stages.line, shape.shards)

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
        with self._lending.in_line(due=task.due):
            while busy := [worker for worker in workers if not worker.is_done]:
                for worker in busy:
                    while not worker.is_done and worker.can_go():
                        worker.go()
            relay.finish()
            fold.end_round()
        for replica in self._replicas:
            replica.end()


def line_of(
    replicas: Sequence[Replica],
    attached: Callable[[Replica], AbstractContextManager[object]],
    exchange: Exchange,
    lending: Lending,
    compilers: Compilers,
) -> Line | None:
    """Make the `Line` of this process's devices; None if each computes whole shards.

    Raises:
        ValueError: ``torch.compile`` has a part in the model or its loss, or ``torch.jit`` in one
            of its stages.
    """
    if exchange.relay is None:
        return None
    if compilers.compiled:
        raise ValueError(
            "expected a model that is not compiled with --keep stages, which leaves the loss in "
            "its midst: leave out torch.compile and compile=True, or use --keep span"
        )
    stages = replicas[0].stages
    assert stages is not None
    for name, module in zip(stages.stages.names[ROOT + 1 :], stages.modules, strict=True):
        if isinstance(module, torch.jit.ScriptModule):
            raise ValueError(
                f"expected stages that Python calls with --keep stages, got {name}, which "
                f"torch.jit has compiled: leave out torch.jit, or use --keep span"
            )
    return Line(replicas, attached, exchange, lending)


def _tell(stages: Stages, lines: int, shards: int) -> None:
    """Say which device has which stages, and what lines cost."""
    parts = []
    for place in range(stages.line):
        own = [n for n, at in zip(stages.names, stages.places, strict=True) if at == place]
        named = own[ROOT + 1 :] if place == 0 else own
        parts.append(named[0] if len(named) == 1 else f"{named[0]} to {named[-1]}")
    most = -(-shards // lines)
    _log.warning(
        "%s of %d devices: %s. With %d shard%s%s a step takes %.0f %% longer than the work of one "
        "device, waiting for others: more shards wait less",
        "a line" if lines == 1 else f"{lines} lines side by side, each",
        stages.line,
        " | ".join(parts),
        most,
        "" if most == 1 else "s",
        "" if lines == 1 else " in a line",
        100 * waiting(stages.line, most),
    )
