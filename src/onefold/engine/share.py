"""One device's share of a step: runs its shards, adds up inside its blocks, hands the sums over.

Note: pairs and portions
------------------------
A device's shards are a row of whole blocks of the fold's tree. Inside a block gradients are added
as they come: the left half is finished and kept before the right half is begun, so a device holds
one partial sum for each level of the tree at most, whatever its number of shards.
"""

from __future__ import annotations

from onefold.core.batch import ShardedBatch
from onefold.core.fold import Block, blocks_of, fold
from onefold.engine.gradients import Gradients, add_gradients
from onefold.engine.replica import Replica, ShardTask
from onefold.exchange.exchange import Exchange

__all__ = ["run_share"]


def run_share(
    replica: Replica, batch: ShardedBatch, task: ShardTask, exchange: Exchange
) -> Gradients:
    """Compute a device's shards; fill its rows of the board, and publish a partial sum a block.

    Returns:
        The gradients of the last block: of the whole batch, where there is one shard.

    Raises:
        LossError: the loss is of the wrong kind.
        GradientError: a gradient cannot be added up.
    """
    device, board, watch = replica.number, exchange.board, replica.watch
    shards_run = batch.plan.shards_of(device)

    def leaf(node: Block) -> Gradients | None:
        if node.stop - node.start > 1:
            return None
        if node.start not in batch.shards:
            return replica.nothing
        result = replica.compute(node.start, batch, task)
        board.record(device, node.start, result)
        return result.gradients

    board.clear_rows(device, shards_run)
    replica.begin(task)
    gradients: Gradients = []
    for slot, block in enumerate(blocks_of(shards_run, batch.plan.shards)):
        gradients = fold(leaf, block, add_gradients)
        start = watch.now()
        exchange.publish(device, slot, gradients)
        watch.note("exchange", "publish", start)
    replica.end()
    return gradients
