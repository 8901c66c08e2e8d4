"""Memory that the processes of one host share; here they are threads."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import pytest
import torch

from onefold.core.flat import FlatTensors
from onefold.core.fold import Published, blocks_of, published_by
from onefold.core.shard import Plan
from onefold.core.storage import Storage, cut_chunks
from onefold.errors import PeerLost
from onefold.exchange.exchange import Exchange
from onefold.exchange.memory import Start
from onefold.exchange.shared import HostMemory, shared_exchange
from tests.exchange.contract import (
    BUFFERS,
    SHARDS,
    check_exchange,
    roster,
    start,
    storage,
    tensors,
    uneven_spans,
)
from tests.exchange.together import endings, mailboxes, together

Made = tuple[Storage, list[Start], list[Exchange]]
"""The sizes, what each device brought along, and the exchange of each."""

LARGE = list(tensors()).index("large")


@contextmanager
def shared(devices: int) -> Iterator[Made]:
    sizes = storage(devices)
    begun = [start(rank, sizes) for rank in range(devices)]
    with mailboxes(devices) as boxes:
        yield (
            sizes,
            begun,
            together(
                devices,
                lambda rank: shared_exchange(sizes, begun[rank], boxes[rank], roster(sizes)),
            ),
        )


@pytest.fixture
def pair() -> Iterator[Made]:
    with shared(2) as made:
        yield made


def memory_of(exchange: Exchange) -> HostMemory:
    assert isinstance(exchange.memory, HostMemory)
    return exchange.memory


def ones(value: float) -> list[torch.Tensor | None]:
    return [torch.full_like(tensor, value) for tensor in tensors().values()]


def test_threads_keep_the_contract() -> None:
    with shared(2) as (sizes, begun, made):
        together(
            2, lambda rank: check_exchange(made[rank], sizes, begun[rank], range(rank, rank + 1))
        )


def test_the_parameters_exist_once(pair: Made) -> None:
    _, _, (one, other) = pair
    assert memory_of(one).is_common
    assert [sorted(memory_of(exchange).trained) for exchange in (one, other)] == [[0], [1]]
    for kind in ("trained", "other"):
        mine, theirs = getattr(one.memory, kind)[0], getattr(other.memory, kind)[1]
        mine.views[0].fill_(77)
        assert bool((theirs.views[0] == 77).all())


def test_the_board_is_common(pair: Made) -> None:
    _, _, (one, other) = pair
    one.board.weights[3] = 0.5
    other.board.totals[2] = 1 / 3
    other.board.gave[1, 2] = 4
    assert other.board.weights[3] == 0.5
    assert one.board.totals[2] == 1 / 3
    assert one.board.gave[1, 2] == 4


def test_values_of_the_lead_become_everybodys(
    pair: Made,
) -> None:
    _, begun, made = pair
    for rank, exchange in enumerate(made):
        assert all(bool((v == 1).all()) for v in memory_of(exchange).trained[rank].views)
        assert memory_of(exchange).other[rank].views[0].tolist() == [5.0] * 4
        assert [view.tolist() for view in begun[rank].buffers.views] == [[0] * 3] * len(BUFFERS)
    assert bool((begun[1].trained[0] == 2).all()), "those of the script are left alone"


def test_buffers_follow_the_lead_again(
    pair: Made,
) -> None:
    _, begun, made = pair
    for rank in range(2):
        begun[rank].buffers.views[0].fill_(30 + rank)
    together(2, lambda rank: memory_of(made[rank]).follow_lead(begun[rank].buffers))
    assert [start.buffers.views[0].tolist() for start in begun] == [[30.0] * 3] * 2


def large_in(flat: FlatTensors, sizes: Storage, span: range) -> list[torch.Tensor]:
    """The chunks of the large tensor in a span."""
    chunks = cut_chunks(sizes.gradients, [sizes.pieces[number] for number in span])
    return [flat.chunk(chunk) for chunk in chunks if chunk.entry == LARGE]


@pytest.mark.parametrize("turn", [0, 1, 3])
def test_a_large_gradient_is_copied_where_another_device_owns_it_alone(
    pair: Made, turn: int
) -> None:
    sizes, _, (one, other) = pair
    now = roster(sizes)
    if turn:
        now = now.next(spans=uneven_spans(now, turn))
        for exchange in (one, other):
            exchange.bind(now)
    one.publish(0, 0, ones(3.0))
    seen = memory_of(other).partial(Published(0, 0))
    assert isinstance(seen, FlatTensors)
    assert all(bool((part == 0).all()) for part in large_in(seen, sizes, now.spans[0]))
    assert all(bool((part == 3).all()) for part in large_in(seen, sizes, now.spans[1]))
    assert len(large_in(seen, sizes, range(now.pieces))) > 0
    assert bool((seen.views[0] == 3).all()), "small ones lie side by side for all"


@pytest.mark.parametrize("counts", [(4, 3), (7, 0), (0, 7), (1, 6)], ids=str)
def test_partial_sums_of_any_plan_are_seen_by_all(pair: Made, counts: Sequence[int]) -> None:
    _, _, made = pair
    plan = Plan(tuple(counts))

    def total(rank: int) -> set[float]:
        exchange = made[rank]
        for slot in range(len(blocks_of(plan.shards_of(rank), SHARDS))):
            exchange.publish(rank, slot, ones(1.0))
        exchange.collect(plan)
        values = {float(t.max()) for t in exchange.totals(rank) if t is not None and t.numel()}
        exchange.spread()
        return values

    blocks = float(len(published_by(plan)))
    assert together(2, total) == [{blocks}] * 2


def test_gradients_are_let_go_after_the_step(
    pair: Made,
) -> None:
    _, _, made = pair

    def step(rank: int) -> None:
        made[rank].publish(rank, 0, ones(2.0))
        made[rank].collect(Plan((4, 3)))
        made[rank].spread()

    together(2, step)
    for rank, exchange in enumerate(made):
        own = memory_of(exchange)._own[0]
        assert own._direct == {}
        assert list(exchange.totals(rank)) == []


def test_who_leaves_is_named_by_the_others(
    pair: Made,
) -> None:
    _, _, (one, other) = pair
    other.close()
    with pytest.raises(PeerLost, match="device 1"):
        one.collect(Plan((4, 3)))


def test_an_error_of_the_lead_while_memory_is_made_reaches_the_others(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """As `onefold.exchange.joining` tells it."""

    def refuse(size_bytes: int, heap: object = None) -> None:
        raise OSError(12, "expected some bytes of memory")

    monkeypatch.setattr("onefold.exchange.shared.new_file", refuse)
    sizes = storage(2)
    with mailboxes(2) as boxes:

        def make(rank: int) -> None:
            try:
                shared_exchange(sizes, start(rank, sizes), boxes[rank], roster(sizes))
            except OSError as error:
                boxes[rank].tell_failure(error)
                raise

        first, second = endings(2, make)
    assert isinstance(first, OSError)
    assert "device 0 failed in step 1: OSError: [Errno 12] expected some bytes" in str(second)
