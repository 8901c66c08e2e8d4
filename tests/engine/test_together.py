"""Shards in turns: threads that stop and go on, what is put aside, and rows that are traded."""

from __future__ import annotations

import random
import threading
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from onefold.core.shard import Plan
from onefold.engine.gatherers import Ended, ShardThread, ThreadSettings, put_aside
from onefold.engine.valuetrade import Gathered, RowTrade, Standing
from onefold.errors import LossError
from tests.engine.assembled import CPU, Restless, cut, engine_of, replica_of
from tests.engine.meeting import Seat, together
from tests.small import points
from tests.tables import for_each

TINY = 2.0**-24


# Threads


def test_work_stops_and_goes_on_with_the_answer() -> None:
    def work() -> str:
        return f"last {thread.stop('first')} {thread.stop('second')}"

    thread = ShardThread("turns", work)
    assert thread.resume() == "first"
    assert thread.resume(1) == "second"
    assert thread.resume(2) == "last 1 2"
    thread.end()
    assert threading.active_count() == 1


def test_work_that_is_ended_is_unwound_even_if_it_objects() -> None:
    seen: list[str] = []

    def work() -> str:
        try:
            thread.stop("first")
        except Ended:
            seen.append("ended")
        thread.stop("once more")
        return "never"

    thread = ShardThread("turns", work)
    thread.resume()
    thread.end()
    thread.end()
    assert seen == ["ended"]
    assert threading.active_count() == 1


def test_work_that_was_never_begun_ends_at_once() -> None:
    ShardThread("turns", lambda: "never").end()


def test_an_error_comes_out_of_resume() -> None:
    def work() -> str:
        thread.stop("first")
        raise ArithmeticError("the fault")

    thread = ShardThread("turns", work)
    thread.resume()
    with pytest.raises(ArithmeticError, match="the fault"):
        thread.resume()
    thread.end()


def test_a_thread_computes_under_the_settings_of_the_one_that_made_it() -> None:
    def state() -> tuple[object, ...]:
        low = torch.is_autocast_enabled("cpu"), torch.get_autocast_dtype("cpu")
        return low, torch.is_grad_enabled(), torch.get_default_device(), torch.get_num_threads()

    def work() -> Any:
        with settings.here():
            return state()

    with torch.no_grad(), torch.autocast("cpu", torch.float16), torch.device("meta"):
        settings, expected = ThreadSettings(CPU), state()
        thread = ShardThread("settings", work)
        assert thread.resume() == expected
    thread.end()


# What is put aside


def test_what_is_put_aside_comes_back() -> None:
    module = Restless()
    replica = replica_of(module)
    module.note = ["mine"]
    module.usual.weight.grad = gradient = torch.ones_like(module.usual.weight)
    module.norm.running_mean += 1.0
    torch.manual_seed(5)
    put_back = put_aside(replica)
    expected = torch.rand(3), random.random(), float(np.random.rand())
    assert module.usual.weight.grad is None
    module.note, module.other = ["another's"], 1
    module.eval()
    module.usual.requires_grad_(False)
    module.norm.running_mean = torch.zeros(3)
    put_back()
    assert (module.note, hasattr(module, "other")) == (["mine"], False)
    assert module.training
    assert module.norm.training
    assert module.usual.weight.grad is gradient
    assert module.usual.weight.requires_grad
    assert module.norm.running_mean.tolist() == [1.0] * 3
    assert torch.equal(expected[0], torch.rand(3))
    assert (random.random(), float(np.random.rand())) == expected[1:]
    module.usual.weight.grad = None


# Trades


def trades(plan: Plan, samples: int) -> list[RowTrade]:
    """One trade for each device, all of one process each; and one of all devices."""
    engine = engine_of(shards=plan.shards, devices=plan.devices)
    batch = cut(points(samples), 0, plan=plan)
    return [RowTrade(engine.exchange.transport, engine.replicas, batch, 7)]


@for_each("plan", [(4,), (1, 3), (4, 0), (0, 2, 2), (1, 1, 1, 1)])
def test_rows_are_joined_in_the_order_of_shards(plan: tuple[int, ...]) -> None:
    (trade,) = trades(Plan(plan), 3)
    own = {0: torch.ones(2, 2), 1: torch.zeros(0, 2), 2: torch.full((1, 2), 2.0)}
    shapes = {shard: tuple(tensor.shape) for shard, tensor in own.items()}
    call = Gathered(0, torch.float32, shapes, True)
    assert trade.join(call, own).tolist() == [[1.0, 1.0], [1.0, 1.0], [2.0, 2.0]]
    assert [call.own(shard) for shard in own] == [slice(0, 2), slice(2, 2), slice(2, 3)]


@for_each("plan", [(4,), (1, 3), (3, 1), (0, 2, 2), (1, 1, 1, 1)])
def test_gradients_are_added_in_the_folds_order_and_not_in_low_precision(
    plan: tuple[int, ...],
) -> None:
    (trade,) = trades(Plan(plan), 8)
    numbers = [1.0, TINY, TINY, TINY]
    shapes = dict.fromkeys(range(4), (1,))
    call = Gathered(0, torch.float32, shapes, True)
    given = {shard: torch.full((4,), number) for shard, number in enumerate(numbers)}
    assert trade.add_up(call, given).tolist() == [float(np.float32(1.0 + 2 * TINY))] * 4
    low = Gathered(0, torch.bfloat16, shapes, True)
    given = {shard: torch.full((4,), 1.0 + shard / 128).bfloat16() for shard in range(4)}
    total = trade.add_up(low, given)
    assert total.dtype == torch.bfloat16
    assert total.tolist() == [torch.tensor(4.046875).bfloat16().item()] * 4


def test_devices_of_several_processes_trade_alike() -> None:
    plan = Plan((3, 1))
    batch = cut(points(4), 0, plan=plan)
    replicas = [replica_of(nn.Linear(2, 1), number=n) for n in range(2)]

    def work(seat: Seat) -> list[float]:
        own = {0: range(3), 1: range(3, 4)}[seat.number]
        trade = RowTrade(seat, [replicas[seat.number]], batch, 7)
        standing = Standing("gather", dtype="torch.float32", shape=(1, 1), differentiable=True)
        found = trade.agree(dict.fromkeys(own, standing))
        shapes = {shard: each.shape for shard, each in found.items()}
        call = Gathered(0, torch.float32, shapes, True)
        whole = trade.join(call, {s: torch.full((1, 1), float(s)) for s in own})
        sums = trade.add_up(call, {s: torch.full((4, 1), 1.0 + s) for s in own})
        return [*whole.flatten().tolist(), *sums.flatten().tolist()]

    assert together(work) == [[0.0, 1.0, 2.0, 3.0, *[10.0] * 4]] * 2


def test_shards_that_stand_elsewhere_are_named() -> None:
    (trade,) = trades(Plan((2, 2)), 8)
    gathers = Standing("gather", dtype="torch.int64", shape=(2,))
    with pytest.raises(LossError, match=r"of step 7 .*shard 0 gathers int64 \(2,\), without a gra"):
        trade.agree({0: gathers, 1: gathers, 2: Standing("end", terms=1), 3: gathers})


def test_samples_that_are_few_leave_shards_out() -> None:
    (trade,) = trades(Plan((2, 2)), 1)
    standing = Standing("end", terms=2)
    assert trade.agree({0: standing}) == {0: standing}
