"""The order of a step, over memory and transport that only note what they are asked for."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import pytest
import torch

from onefold.core.flat import FlatTensors
from onefold.core.fold import Published
from onefold.core.roster import Roster
from onefold.core.shard import Plan
from onefold.core.storage import Storage
from onefold.exchange.board import Board
from onefold.exchange.exchange import Exchange
from onefold.exchange.memory import Arrivals, Memory
from onefold.exchange.spans import Partial
from onefold.exchange.transport import Transport
from tests.exchange.contract import SHARDS, roster, storage, tensors, uneven_spans
from tests.exchange.together import CPU

Notes = list[str]
PLAN = Plan((4, 3))


class NotedTransport(Transport):
    """Two devices, of which the other one says the same."""

    def __init__(self, notes: Notes) -> None:
        self._notes = notes

    def begin_step(self, step: int) -> None:
        super().begin_step(step)
        self._notes.append(f"begin step {step}")

    def meet(self, word: bytes = b"") -> Sequence[bytes]:
        self._notes.append(f"meet {word.decode()}")
        return [word, word]

    def close(self, failure: BaseException | None = None) -> None:
        self._notes.append(f"close {failure!r}")

    def room(self, nbytes: int) -> torch.Tensor:
        raise NotImplementedError

    def bring(self) -> list[torch.Tensor]:
        raise NotImplementedError

    def hand_out(self, make: Callable[[int], torch.Tensor] | None) -> torch.Tensor:
        raise NotImplementedError


class NotedArrivals:
    """Whoever waits for a chunk writes into what comes."""

    def __init__(self, notes: Notes) -> None:
        self._notes = notes

    def wait_for(self, chunk: int) -> None:
        self._notes.append(f"wait for {chunk}")

    def finish(self) -> None:
        self._notes.append("finish")


class NotedMemory(Memory):
    """Device 0 of two."""

    def __init__(self, sizes: Storage, notes: Notes, *, arrives: bool) -> None:
        self.board = Board.private(sizes.board, CPU)
        self.trained = {0: FlatTensors(sizes.parameters)}
        self.other = {0: FlatTensors(sizes.other)}
        self.partials = {
            Published(device, slot): Partial(FlatTensors(sizes.gradients))
            for device in range(2)
            for slot in range(sizes.slots)
        }
        self._notes = notes
        self._arrives = arrives

    def bind(self, roster: Roster) -> None:
        self._notes.append(f"bind {roster.generation}")

    def publish(self, device: int, slot: int, gradients: Sequence[torch.Tensor | None]) -> None:
        self._notes.append(f"publish {device} {slot}")
        self.partials[Published(device, slot)].write(gradients)

    def collect(self, plan: Plan) -> Arrivals | None:
        self._notes.append(f"collect {plan.counts}")
        return NotedArrivals(self._notes) if self._arrives else None

    def collect_board(self, plan: Plan) -> None:
        self._notes.append(f"collect board {plan.counts}")

    def partial(self, place: Published) -> Partial:
        self._notes.append(f"partial {place.device} {place.slot}")
        return self.partials[place]

    def hand_on(self) -> None:
        self._notes.append("hand on")

    def share_gradient(self, whole: FlatTensors) -> None:
        self._notes.append("share gradient")

    def release(self) -> None:
        self._notes.append("release")

    def follow_lead(self, buffers: FlatTensors) -> None:
        raise NotImplementedError

    def adopt_lead(self, values: torch.Tensor) -> None:
        raise NotImplementedError


class Noted:
    """An exchange, and what it asks for in turn."""

    def __init__(self, *, arrives: bool = False) -> None:
        self.sizes = storage(2)
        self.notes: Notes = []
        self.memory = NotedMemory(self.sizes, self.notes, arrives=arrives)
        self.roster = roster(self.sizes, PLAN)
        self.exchange = Exchange(self.sizes, self.memory, NotedTransport(self.notes), self.roster)

    def taken(self) -> Notes:
        """The notes since the last time."""
        taken = list(self.notes)
        self.notes.clear()
        return taken

    def publish(self, *values: float) -> None:
        for slot, value in enumerate(values):
            self.exchange.publish(0, slot, full(value))


def full(value: float) -> list[torch.Tensor | None]:
    return [torch.full_like(tensor, value) for tensor in tensors().values()]


def shapes(noted: Noted, span: range) -> list[torch.Size]:
    flat = FlatTensors(noted.sizes.gradients)
    return [flat.piece(noted.sizes.pieces[number]).shape for number in span]


@pytest.fixture
def noted() -> Noted:
    return Noted()


def test_memory_is_bound_to_the_first_roster_and_nobody_is_waited_for(noted: Noted) -> None:
    assert noted.taken() == ["bind 0"]
    assert noted.exchange.board is noted.memory.board


def test_a_call_begins_with_a_meeting_in_its_step(noted: Noted) -> None:
    noted.taken()
    assert noted.exchange.agree(7, b"word") == [b"word", b"word"]
    assert noted.taken() == ["begin step 7", "meet word"]
    assert noted.exchange.transport.step == 7


def test_sums_are_asked_for_when_all_have_been_collected(noted: Noted) -> None:
    noted.taken()
    noted.publish(1.0)
    noted.exchange.collect(PLAN)
    assert noted.taken() == ["publish 0 0", "collect (4, 3)", "partial 0 0", "partial 1 0"]


def test_each_chunk_is_waited_for_and_the_rest_at_the_end() -> None:
    noted = Noted(arrives=True)
    noted.taken()
    noted.exchange.collect(PLAN)
    chunks = len(noted.exchange._folds[0].chunks)
    assert chunks > 1
    waits = [f"wait for {number}" for number in range(chunks)]
    assert noted.taken() == ["collect (4, 3)", "partial 0 0", "partial 1 0", *waits, "finish"]


def test_sums_that_nobody_else_has_are_waited_for_as_well() -> None:
    """Who runs every shard has the total, but others may still read what it sends."""
    noted = Noted(arrives=True)
    noted.taken()
    noted.exchange.collect(Plan((7, 0)))
    assert noted.taken()[-1] == "finish"


def test_memory_is_let_go_when_the_spans_are_everywhere(noted: Noted) -> None:
    noted.taken()
    noted.exchange.spread()
    assert noted.taken() == ["hand on", "release"]


def test_totals_are_of_the_own_span_and_valid_until_the_parameters_are_spread(
    noted: Noted,
) -> None:
    exchange = noted.exchange
    assert list(exchange.totals(0)) == []
    noted.publish(1.0)
    noted.memory.partials[Published(1, 0)].write(full(2.0))
    exchange.collect(PLAN)
    totals = [total for total in exchange.totals(0) if total is not None]
    assert [total.shape for total in totals] == shapes(noted, noted.roster.spans[0])
    assert all(bool((total == 3).all()) for total in totals)
    exchange.spread()
    assert list(exchange.totals(0)) == []


def test_totals_of_another_process_are_not_here(noted: Noted) -> None:
    with pytest.raises(KeyError, match="1"):
        noted.exchange.totals(1)


def test_the_next_roster_moves_the_span(noted: Noted) -> None:
    exchange, now = noted.exchange, noted.roster
    for turn in (1, 3, 0):
        now = now.next(spans=uneven_spans(now, turn) if turn else noted.roster.spans)
        noted.taken()
        exchange.bind(now)
        assert noted.taken() == [f"bind {now.generation}"]
        noted.publish(1.0)
        exchange.collect(PLAN)
        totals = [total for total in exchange.totals(0) if total is not None]
        assert [total.shape for total in totals] == shapes(noted, now.spans[0])
        exchange.spread()


def test_the_plan_of_a_step_may_be_another_than_that_of_the_roster(noted: Noted) -> None:
    plan = Plan((1, SHARDS - 1))
    noted.exchange.collect(plan)
    assert "collect (1, 6)" in noted.taken()


@pytest.mark.parametrize("failure", [None, ValueError("over")], ids=str)
def test_who_leaves_leaves_the_transport(noted: Noted, failure: BaseException | None) -> None:
    noted.taken()
    noted.exchange.close(failure)
    assert noted.taken() == [f"close {failure!r}"]
