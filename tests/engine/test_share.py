"""A device's share: one partial sum a block, added up on the way, and its rows of the board."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, cast

import torch
from torch import nn

from onefold.core.fold import Block, blocks_of, fold
from onefold.core.shard import Plan
from onefold.engine.gradients import Gradients
from onefold.engine.replica import Replica, ShardTask
from onefold.engine.share import run_share
from onefold.exchange.board import Board
from tests.engine.assembled import (
    Restless,
    bytes_of,
    cut,
    engine_of,
    pictures,
    replica_of,
    run_shards,
    task_of,
)
from tests.small import Batch, square
from tests.tables import for_each


class Published:
    """An exchange that keeps what it is given."""

    def __init__(self, board: Board) -> None:
        self.board = board
        self.sums: list[tuple[int, int, tuple[bytes | None, ...]]] = []

    def publish(self, device: int, slot: int, gradients: Sequence[torch.Tensor | None]) -> None:
        self.sums.append((device, slot, tuple(map(bytes_of, gradients))))


def share_of(
    module: nn.Module, plan: Plan, device: int, samples: int, *, loss: Any = square
) -> tuple[Published, Gradients, Replica, ShardTask]:
    """One device's part of the first step."""
    replica = replica_of(module, number=device)
    shape = engine_of(Restless(), shards=plan.shards, devices=plan.devices).exchange.board.shape
    exchange = Published(Board.private(shape, replica.device))
    task = task_of(replica, loss, shards=plan.shards)
    replica.buffers.begin_step()
    given = run_share(replica, cut(pictures(samples), 0, plan=plan), task, cast(Any, exchange))
    replica.buffers.restore()
    return exchange, given, replica, task


def add(left: Gradients, right: Gradients) -> Gradients:
    pairs = zip(left, right, strict=True)
    return [b if a is None else a if b is None else a + b for a, b in pairs]


def expected(plan: Plan, device: int, samples: int) -> list[tuple[bytes | None, ...]]:
    """The sum over each block, from shards computed one by one in another order."""
    replica = replica_of(Restless())
    task = task_of(replica, square, shards=plan.shards)
    batch = cut(pictures(samples), 0, plan=plan)
    results = dict(run_shards(replica, batch, task, sorted(batch.shards, reverse=True)))

    def leaf(node: Block) -> Gradients | None:
        if node.stop - node.start > 1:
            return None
        result = results.get(node.start)
        return replica.nothing if result is None else result.gradients

    blocks = blocks_of(plan.shards_of(device), plan.shards)
    return [tuple(map(bytes_of, fold(leaf, block, add))) for block in blocks]


@for_each(
    ("counts", "samples"), [((5,), 11), ((1, 4), 11), ((3, 2), 4), ((0, 5), 9), ((2, 2, 1), 2)]
)
def test_a_partial_sum_is_published_for_each_block_in_its_slot(
    counts: tuple[int, ...], samples: int
) -> None:
    plan = Plan(counts)
    for device in range(plan.devices):
        exchange, _, _, _ = share_of(Restless(), plan, device, samples)
        assert [(d, slot) for d, slot, _ in exchange.sums] == [
            (device, slot) for slot in range(len(blocks_of(plan.shards_of(device), plan.shards)))
        ]
        assert [sums for _, _, sums in exchange.sums] == expected(plan, device, samples)


def test_rows_of_the_board_are_filled_for_its_own_shards_alone() -> None:
    plan, samples = Plan((2, 3)), 4
    exchange, _, _, _ = share_of(Restless(), plan, 1, samples)
    board = exchange.board
    assert board.weights.tolist() == [0.0, 0.0, 1.0, 1.0, 0.0]  # the last shard is empty
    assert [bool(total) for total in board.totals.tolist()] == [False, False, True, True, False]
    gave = board.gave[1].tolist()
    names = [name for name, _ in Restless().named_parameters()]
    assert gave == [0 if "rare" in name else 2 for name in names]
    assert not board.gave[0].any()
    assert board.changed.any(axis=1).tolist() == [False, False, True, True, False]


def test_what_an_earlier_step_left_on_the_board_is_gone() -> None:
    plan = Plan((2,))
    replica = replica_of(Restless())
    shape = engine_of(Restless(), shards=2).exchange.board.shape
    exchange = Published(Board.private(shape, replica.device))
    task = task_of(replica, square, shards=2)
    for samples in (6, 1):
        replica.buffers.begin_step()
        batch = cut(pictures(samples), 0, plan=plan)
        run_share(replica, batch, task, cast(Any, exchange))
    board = exchange.board
    assert board.weights.tolist() == [1.0, 0.0]
    assert float(board.totals[1]) == 0.0
    assert board.gave.max() == 1


def test_the_gradients_of_the_last_block_come_back() -> None:
    """Those of the whole batch, where one device has all of it."""
    exchange, given, _, _ = share_of(Restless(), Plan((4,)), 0, 8)
    ((_, _, sums),) = exchange.sums
    assert tuple(map(bytes_of, given)) == sums


def test_shards_are_run_from_the_left_and_only_those_that_have_samples() -> None:
    seen: list[tuple[float, ...]] = []

    def loss(model: nn.Module, batch: Batch) -> torch.Tensor:
        seen.append(tuple(batch[1].flatten().tolist()))
        return square(model, batch)

    share_of(Restless(), Plan((1, 4)), 1, 4, loss=loss)
    targets = pictures(4)[1].flatten().tolist()
    assert seen == [(target,) for target in targets[1:]]


def test_no_gradient_is_left_in_the_model() -> None:
    _, _, replica, _ = share_of(Restless(), Plan((2,)), 0, 4)
    assert all(p.grad is None for p in replica.module.parameters())
