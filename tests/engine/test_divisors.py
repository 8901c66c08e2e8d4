"""The divisors of several terms, added up over all shards on every device."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, cast

import pytest
import torch

from onefold.core.batch import ShardedBatch
from onefold.core.shard import Plan
from onefold.engine.together import trade_divisors
from onefold.errors import LossError
from tests.engine.assembled import CPU, cut, engine_of
from tests.engine.meeting import Seat, together
from tests.small import points
from tests.tables import for_each

Terms = Sequence[tuple[str, float]]


def batch_of(samples: int, plan: Plan) -> ShardedBatch:
    return cut(points(samples), 0, plan=plan)


def traded(
    plan: tuple[int, ...], terms: Mapping[int, Terms], *, samples: int = 8
) -> tuple[float, ...] | None:
    """By one process that drives all devices."""
    shared = Plan(plan)
    engine = engine_of(shards=shared.shards, devices=shared.devices)
    found = {
        device: {shard: terms[shard] for shard in shared.shards_of(device) if shard in terms}
        for device in range(shared.devices)
    }
    batch = batch_of(samples, shared)
    return trade_divisors(engine.exchange, batch, found, engine.replicas, 5)


TINY = 2.0**-53
WEIGHTS = {0: 1.0, 1: TINY, 2: TINY, 3: TINY}
IN_THE_FOLDS_ORDER = (1.0 + TINY) + (TINY + TINY)


@for_each("plan", [(4,), (2, 2), (1, 3), (1, 1, 1, 1)])
def test_weights_are_added_in_the_folds_order_whoever_has_them(plan: tuple[int, ...]) -> None:
    terms = {shard: [("mean", weight), ("mean", 1.0)] for shard, weight in WEIGHTS.items()}
    assert traded(plan, terms) == (IN_THE_FOLDS_ORDER, 4.0)
    assert ((1.0 + TINY) + TINY) + TINY != IN_THE_FOLDS_ORDER


def test_a_term_that_is_not_divided_has_the_divisor_1() -> None:
    terms = {shard: [("sum", 1.0), ("mean", 2.0)] for shard in range(4)}
    assert traded((2, 2), terms) == (1.0, 8.0)


def test_empty_shards_add_nothing() -> None:
    terms = {shard: [("mean", 2.0), ("sum", 1.0)] for shard in range(3)}
    assert traded((1, 3), terms, samples=3) == (6.0, 1.0)


def test_a_loss_of_one_term_needs_none_beforehand() -> None:
    assert traded((2, 2), {shard: [("mean", 2.0)] for shard in range(4)}) is None


@for_each(
    ("numbers", "words"),
    [
        ((2, 2, 1, 2), r"^the loss of step 5, shard 2 has 1 terms and that of another shard 2: ex"),
        ((1, 1, 1, 3), "shard 0 has 1 terms and that of another shard 3"),
    ],
)
def test_shards_of_other_numbers_of_terms_are_named(numbers: tuple[int, ...], words: str) -> None:
    terms = {shard: [("mean", 1.0)] * number for shard, number in enumerate(numbers)}
    with pytest.raises(LossError, match=words):
        traded((2, 2), terms)


class ExchangeOf:
    """Divisors need the transport and nothing else."""

    def __init__(self, seat: Seat) -> None:
        self.transport = seat


class DeviceOf:
    def __init__(self, number: int) -> None:
        self.number = number
        self.device = CPU


def test_devices_of_two_processes_have_the_same_divisors() -> None:
    plan = Plan((3, 1))

    def work(seat: Seat) -> tuple[float, ...] | None:
        number = seat.number
        own = {shard: [("mean", WEIGHTS[shard]), ("sum", 1.0)] for shard in plan.shards_of(number)}
        exchange = cast(Any, ExchangeOf(seat))
        return trade_divisors(
            exchange, batch_of(8, plan), {number: own}, [cast(Any, DeviceOf(number))], 1
        )

    assert together(work) == [(IN_THE_FOLDS_ORDER, 1.0)] * 2


def test_devices_of_two_processes_hear_of_the_same_mistake() -> None:
    def work(seat: Seat) -> object:
        number = seat.number
        own = {number: [("mean", 1.0)] * (number + 1)}
        exchange = cast(Any, ExchangeOf(seat))
        devices = [cast(Any, DeviceOf(number))]
        return trade_divisors(exchange, batch_of(8, Plan((1, 1))), {number: own}, devices, 1)

    found = together(work)
    assert [type(each) for each in found] == [LossError] * 2
    assert len(set(map(str, found))) == 1


def test_numbers_travel_in_float64() -> None:
    tiny = 1.0 + 2.0**-40
    terms = {0: [("mean", tiny), ("sum", 1.0)], 1: [("mean", 0.0), ("sum", 1.0)]}
    assert traded((1, 1), terms) == (tiny, 1.0)
    assert torch.tensor(tiny).item() != tiny
