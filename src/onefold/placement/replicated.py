"""Each device has all parameters, and sums the gradients of its own shards.

Note: the order of addition in blocks
-------------------------------------
A device's shards are a sequence of whole blocks of the fold's tree (see `onefold.core.fold`).
Inside a block, gradients are added as they are computed: the left half is finished and kept before
the right half begins, so a device holds at most one partial sum per level of the tree, however many
shards it runs. Two neighboring blocks of one device are never added here, because they are not the
halves of one node: otherwise they would be one block. The owners of the partitions add each block
at its place in the tree.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace
from functools import cached_property, partial
from itertools import islice
from typing import TYPE_CHECKING

import torch

from onefold.core.fold import Block, before_last, blocks_of, fold
from onefold.core.late import load
from onefold.core.results import Gradients, ShardResult
from onefold.core.shard import Shares
from onefold.exchange.exchange import Exchange, has_memory_in_common
from onefold.exchange.reduction import GradientSend
from onefold.placement.base import Before, Done, Estimates, Placement, PlacementLayout
from onefold.shard.gradients import add_gradients
from onefold.shard.model_parts import ModelParts
from onefold.shard.replica import Replica
from onefold.shard.task import ShardTask

if TYPE_CHECKING:
    from onefold.placement.footprint import Footprint

__all__ = ["Replicated", "partial_sums", "run_share"]


def run_share(
    replica: Replica,
    task: ShardTask,
    exchange: Exchange,
    done: Done | None = None,
    *,
    early: bool = True,
) -> Gradients:
    """Compute a device's shards, fill its rows of the table and publish one partial sum per block.

    Args:
        replica: the model on the device.
        task: the task that all shards of the step share.
        exchange: exchange with all devices.
        done: results of shards that have already run; their gradients are added to in place.
        early: whether stages may be sent while backward runs.

    Returns:
        The gradients of the last block. With one shard in all, these are the whole batch's.

    Raises:
        LossError: the loss function returned something that is not a loss.
        GradientError: a gradient is sparse, belongs to an inner backward, or is a tensor that a
            hook returned twice.
    """
    device, table, watch = replica.number, exchange.table, replica.watch
    shares = task.batch.shares
    # Clear only our own rows, because the rows of other devices may already contain results of this
    # step. An empty shard records nothing, so its row would otherwise still hold the previous step.
    table.clear_rows(device, shares.shards_of(device))
    replica.start_step(task)
    exchange.memory.start_step(shares)
    record, gradients = partial(table.record, device), Gradients()
    blocks = blocks_of(shares.shards_of(device), shares.shards)
    sent = blocks[-1:] if early and _may_send_early(replica, task, done) else ()
    whole = blocks[: len(blocks) - len(sent)]
    for slot, gradients in enumerate(partial_sums(replica, task, record, done, whole)):
        start = watch.now()
        # The exchange owns these tensors until `publish_parameters`, and adds to them in place. The
        # gradients of a single shard are never added to, so `GradientRules.norm` may still read
        # them.
        exchange.memory.publish(device, slot, gradients)
        watch.note("exchange", "publish", start)
    for block in sent:
        _send_early(replica, task, exchange, block, slot=len(whole))
    replica.end()
    return gradients


def _may_send_early(replica: Replica, task: ShardTask, done: Done | None) -> bool:
    """Return whether a device may send its last block by stages, during its last backward.

    It may not if the shard runs in microbatches or in turns with other shards.
    """
    batch = task.batch
    shards = batch.shares.shards_of(replica.number)
    if replica.stages is None or task.gatherers is not None or not shards:
        return False
    last = shards[-1]
    if last not in batch.shards or last in (done or ()):
        return False
    return task.microbatch is None or batch.count_of(last).samples <= task.microbatch


def _send_early(
    replica: Replica, task: ShardTask, exchange: Exchange, block: Block, *, slot: int
) -> None:
    """Compute a block, and send each stage of its sum as soon as it is complete."""
    assert replica.stages is not None
    entries, record = replica.stages.stages.entries, partial(exchange.table.record, replica.number)
    # The leftmost sum first, as in `fold`: later sums are added to it in its send buffer.
    found = partial_sums(replica, task, record, None, before_last(block))
    sums = [*map(partial(exchange.memory.hold, slot), islice(found, 1)), *found][::-1]

    def send(given: GradientSend) -> None:
        gradients = list(given.gradients)
        for each in sums:
            left = [each[number] for number in entries[given.stage]]
            gradients = add_gradients(left, gradients)
        exchange.memory.publish_stage(slot, given.stage, gradients)

    last = block.stop - 1
    record(last, replica.compute(last, replace(task, send=send)))


def partial_sums(
    replica: Replica,
    task: ShardTask,
    record: Callable[[int, ShardResult], None],
    done: Done | None = None,
    blocks: Sequence[Block] | None = None,
) -> Iterator[Gradients]:
    """Compute a device's shards, and add up the gradients of each block.

    Args:
        replica: the model on the device; it has started the step.
        task: the task that all shards of the step share.
        record: called with the number and the result of each shard that has samples.
        done: results of shards that have already run.
        blocks: blocks to compute; None for all of the device's blocks.
    """

    batch = task.batch

    def leaf(node: Block) -> Gradients | None:
        if node.stop - node.start > 1:
            # Return None for a block of several shards: `fold` then requests its halves, the left
            # one first.
            return None
        if node.start not in batch.shards:
            # An empty shard stays in the tree and adds nothing, because the tree depends on V
            # alone.
            return replica.nothing
        computed = (done or {}).get(node.start)
        result = computed or replica.compute(node.start, task)
        record(node.start, result)
        return result.gradients

    if blocks is None:
        blocks = blocks_of(batch.shares.shards_of(replica.number), batch.shares.shards)
    for block in blocks:
        yield fold(leaf, block, add_gradients)


class Replicated(Placement):
    """Each device has all parameters, and sums the gradients of all of its shards."""

    @classmethod
    def estimate(cls, sizes: Footprint, devices: int, *, together: bool) -> Estimates:
        apart, each = devices > 1 and not together, {}
        for form, updating in (("replicate", devices), ("replicate:state", 1)):
            if not apart:
                updating = devices
                # The gradients of backward, and those sent to owners; then a sum for each level of
                # the tree of a device's shards, or the optimizer's temporary memory.
                sums = sizes.gradients * (1 + (devices > 1))
                scratch = 0 if together else sizes.scratch
                sums += max(sizes.gradients * sizes.levels(devices), scratch)
            else:
                sums = _sums_apart(sizes, devices, updating)
            each[form] = sums + sizes.state // updating + sizes.values(devices, together=together)
        return each

    def layout(
        self, parts: ModelParts, stages: Sequence[torch.nn.Module] | None
    ) -> PlacementLayout:
        if has_memory_in_common(self.devices) or self.settings.shards == 1:
            return PlacementLayout()
        mirrors = self.devices.context.options.placement == "replicate:state"
        cut = load("shard.stage_modules").StageModules
        early = cut(parts.module, stages, parts.trained, merged=stages is None)
        return PlacementLayout(early=early, mirrors=mirrors)

    @cached_property
    def _launches(self) -> AbstractContextManager[None]:
        """Notes whether an accelerator waits for the launches of its shards."""
        # With this placement, the host only launches while the shards run: it neither gathers
        # parameters nor waits for another process.
        first, last = self.context.first, self.context.replicas[-1]
        if last.device.type == "cpu":
            return nullcontext()
        made: AbstractContextManager[None] = load("watch.limits").LaunchWatch(
            last.number, first.watch, last.watch
        )
        return made

    def run_shards(self, task: ShardTask, done: Done, before: Before) -> Gradients | None:
        context, gradients = self.context, Gradients()
        with self._launches:
            for replica in context.replicas:
                with context.attached(replica), before(replica):
                    # Compiled code has no stages, and would be recompiled with their hooks.
                    early = not context.compilers.compiled
                    gradients = run_share(replica, task, context.exchange, done, early=early)
        return gradients if task.shards == 1 else None


def _sums_apart(sizes: Footprint, devices: int, updating: int) -> int:
    """Return the bytes of gradients if devices share no memory; ``updating`` update each
    parameter."""
    shares = Shares.even(shards=sizes.shards, devices=devices)
    blocks = [blocks_of(shares.shards_of(number), sizes.shards) for number in range(devices)]
    counts = [len(each) for each in blocks]
    largest = max(stop - start for each in blocks for start, stop in each)
    # A partial sum per block, and a partition of all partial sums of the other devices, or all of
    # them; then the sums below the largest one, or the optimizer's temporary memory.
    held = sizes.gradients * max(counts)
    came = sizes.gradients * (sum(counts) - max(counts)) // updating
    levels = (largest - 1).bit_length()
    below = sizes.gradients * (levels + 1)
    if max(counts) == 1 and sizes.sent and (updating == 1 or devices not in sizes.uneven):
        # Before the last shard, one sum has moved to its send buffer.
        at_hand = max(sizes.gradients * min(levels, 1), sizes.RESIDENT * sizes.sent)
        below = sizes.gradients * max(levels - 1, 0) + at_hand
    return held + came + max(below, sizes.scratch // updating)
