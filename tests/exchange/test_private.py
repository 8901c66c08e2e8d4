"""Memory of which the other processes see nothing; here they are threads of one group."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import pytest
import torch

from onefold.core.fold import Published, blocks_of, published_by
from onefold.core.roster import Roster
from onefold.core.shard import Plan
from onefold.core.storage import Storage
from onefold.exchange.collective import GroupTransport
from onefold.exchange.exchange import Exchange
from onefold.exchange.memory import Start
from onefold.exchange.private import PrivateMemory, collective_exchange
from onefold.exchange.spans import SpanTensors
from tests.exchange.contract import (
    BUFFERS,
    CPU,
    SHARDS,
    check_exchange,
    roster,
    start,
    storage,
    tensors,
    uneven_spans,
)
from tests.exchange.together import LIMIT_S, joined, together

Made = tuple[Storage, list[Start], list[Exchange]]
"""The sizes, what each device brought along, and the exchange of each."""

PLAN = Plan((4, 3))


@contextmanager
def private(devices: int) -> Iterator[Made]:
    sizes = storage(devices)
    begun = [start(rank, sizes) for rank in range(devices)]
    with joined(devices) as parts:

        def make(rank: int) -> Exchange:
            return collective_exchange(
                sizes, begun[rank], GroupTransport(CPU, parts[rank], LIMIT_S), roster(sizes)
            )

        made = together(devices, make)
        yield sizes, begun, made
        for exchange in made:
            exchange.close()


@pytest.fixture
def pair() -> Iterator[Made]:
    with private(2) as made:
        yield made


def memory_of(exchange: Exchange) -> PrivateMemory:
    assert isinstance(exchange.memory, PrivateMemory)
    return exchange.memory


def ones() -> list[torch.Tensor | None]:
    return [torch.ones_like(tensor) for tensor in tensors().values()]


def publish(exchange: Exchange, rank: int, plan: Plan) -> None:
    for slot in range(len(blocks_of(plan.shards_of(rank), SHARDS))):
        exchange.publish(rank, slot, ones())


def test_threads_keep_the_contract() -> None:
    with private(2) as (sizes, begun, made):
        together(
            2, lambda rank: check_exchange(made[rank], sizes, begun[rank], range(rank, rank + 1))
        )


def test_every_process_has_parameters_of_its_own(pair: Made) -> None:
    _, begun, (one, other) = pair
    assert not memory_of(one).is_common
    one.memory.trained[0].views[0].fill_(77)
    assert bool((other.memory.trained[1].views[0] == 1).all()), "the lead's values"
    assert other.memory.other[1].views[0].tolist() == [5.0] * 4
    assert bool((begun[1].trained[0] == 2).all()), "those of the script are left alone"


def test_buffers_of_any_type_follow_the_lead(pair: Made) -> None:
    _, begun, _ = pair
    for brought in begun:
        assert [view.tolist() for view in brought.buffers.views] == [[0] * 3] * len(BUFFERS)


def test_the_board_of_one_is_seen_by_the_other_after_collect_alone(pair: Made) -> None:
    _, _, made = pair

    def step(rank: int) -> list[float]:
        board = made[rank].board
        board.weights[rank * 4] = 1.5 + rank
        board.gave[rank, 0] = 6 + rank
        before = board.weights[4 - rank * 4]
        publish(made[rank], rank, PLAN)
        made[rank].collect(PLAN)
        found = [before, board.weights[4 - rank * 4], board.gave[1 - rank, 0]]
        made[rank].spread()
        return found

    assert together(2, step) == [[0.0, 2.5, 7], [0.0, 1.5, 6]]


@pytest.mark.parametrize("counts", [(4, 3), (7, 0), (0, 7), (1, 6)], ids=str)
def test_partial_sums_of_any_plan_are_added(pair: Made, counts: tuple[int, int]) -> None:
    _, _, made = pair
    plan = Plan(counts)

    def total(rank: int) -> set[float]:
        publish(made[rank], rank, plan)
        made[rank].collect(plan)
        values = {float(t.max()) for t in made[rank].totals(rank) if t is not None and t.numel()}
        made[rank].spread()
        return values

    assert together(2, total) == [{float(len(published_by(plan)))}] * 2


def received(exchange: Exchange) -> dict[Published, SpanTensors]:
    return memory_of(exchange)._received


def step_of(made: list[Exchange], plan: Plan = PLAN) -> None:
    def step(rank: int) -> None:
        publish(made[rank], rank, plan)
        made[rank].collect(plan)
        made[rank].spread()

    together(2, step)


def numel_of(spans: SpanTensors) -> int:
    return sum(section.numel() for section in spans._sections.values())


def test_of_the_others_sums_a_device_holds_its_own_span_alone(pair: Made) -> None:
    sizes, _, made = pair
    step_of(made)
    for rank, exchange in enumerate(made):
        span = [sizes.pieces[number] for number in roster(sizes).spans[rank]]
        assert {place.device for place in received(exchange)} == {1 - rank}
        for held in received(exchange).values():
            assert numel_of(held) < 1.01 * sum(piece.numel for piece in span) + 100


def test_the_next_roster_takes_the_place_of_what_was_held_for_the_last(pair: Made) -> None:
    sizes, _, made = pair
    step_of(made)
    now: Roster = roster(sizes)
    now = now.next(spans=uneven_spans(now, 3))
    for exchange in made:
        exchange.bind(now)
        assert received(exchange) == {}
    step_of(made)
    first, second = (next(iter(received(exchange).values())) for exchange in made)
    assert numel_of(first) > 10 * numel_of(second)


@pytest.mark.parametrize("changed", [False, True])
def test_buffers_travel_only_where_a_shard_changed_some(
    pair: Made, changed: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    _, _, made = pair
    gathered: list[int] = []
    for exchange in made:
        transport = memory_of(exchange)._transport
        gather = transport.gather
        monkeypatch.setattr(
            transport, "gather", lambda t, gather=gather: gathered.append(len(t)) or gather(t)
        )

    def step(rank: int) -> list[float]:
        board = made[rank].board
        for shard in PLAN.shards_of(rank):
            board.buffer_rows[shard].views[0].fill_(shard)
        board.changed[6, 0] = changed and rank == 1
        publish(made[rank], rank, PLAN)
        made[rank].collect(PLAN)
        found = [float(board.buffer_rows[shard].views[0][0]) for shard in range(SHARDS)]
        made[rank].spread()
        return found

    own = [[0.0, 1, 2, 3, 0, 0, 0], [0.0, 0, 0, 0, 4, 5, 6]]
    every = [[float(shard) for shard in range(SHARDS)]] * 2
    assert together(2, step) == (every if changed else own)
    assert gathered == ([4, 4] if changed else [])


def test_gradients_are_let_go_after_the_step(pair: Made) -> None:
    _, _, made = pair
    step_of(made)
    for rank, exchange in enumerate(made):
        assert all(partial._direct == {} for partial in memory_of(exchange)._own.values())
        assert list(exchange.totals(rank)) == []
