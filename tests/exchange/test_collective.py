"""Processes that reach each other through torch.distributed; here they are threads of one group."""

from __future__ import annotations

import re
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import timedelta
from typing import Any, cast

import pytest
import torch
import torch.distributed as dist

from onefold.errors import (
    OnefoldError,
    PeerError,
    PeerFailed,
    PeerLost,
    PeerTimeout,
)
from onefold.exchange import collective
from onefold.exchange.collective import GroupTransport, Moving, Operation
from onefold.system.compat import Groups
from tests.exchange.together import CPU, LIMIT_S, joined, together
from tests.tables import for_each

Pair = list[GroupTransport]


@contextmanager
def transports(size: int, *, timeout_s: float = LIMIT_S) -> Iterator[Pair]:
    with joined(size, timeout_s=timeout_s) as parts:
        ends = [GroupTransport(CPU, part, timeout_s) for part in parts]
        yield ends
        for end in ends:
            end.close()


@pytest.fixture
def pair() -> Iterator[Pair]:
    with transports(2) as ends:
        yield ends


# Limits


CALLS: dict[str, Callable[[GroupTransport], object]] = {
    "meet": lambda end: end.meet(b"word"),
    "meet among": lambda end: end.meet_among([0, 1], b"word"),
    "share": lambda end: end.share({end.rank: torch.ones(3, dtype=torch.float64)}),
    "gather": lambda end: end.gather(torch.ones(3)),
    "gather bytes": lambda end: end.gather_bytes({end.rank: b"some"}),
    "follow the lead": lambda end: end.follow_lead([torch.ones(3)]),
    "move": lambda end: exchanged(end).finish(),
    "move a chunk": lambda end: by_chunks(exchanged(end)),
    "send and receive": lambda end: sent_and_received(end),
    "bring": lambda end: brought(end),
    "hand out": lambda end: end.hand_out(
        (lambda _: torch.ones(LONG, dtype=torch.uint8)) if end.rank == 0 else None
    ),
}
LONG = 50_000_000
"""Bytes that do not leave before somebody takes them."""


def exchanged(end: GroupTransport) -> Moving:
    parts = [torch.ones(LONG // 4), torch.empty(LONG // 4)]
    return end.move(
        [
            Operation(sends, 1 - end.rank, p, 0)
            for sends, p in zip((True, False), parts, strict=True)
        ]
    )


def by_chunks(moving: Moving) -> None:
    moving.wait_for(0)
    moving.finish()


def sent_and_received(end: GroupTransport) -> None:
    end.begin_sending(1 - end.rank, torch.ones(LONG // 4))
    end.receive(1 - end.rank, torch.empty(LONG // 4))
    end.finish_sending()


def brought(end: GroupTransport) -> None:
    end.room(LONG)
    end.bring()


@pytest.mark.full
@for_each("late", [0, 1])
@for_each("name", CALLS)
def test_a_wait_has_the_limit_of_the_run_and_not_that_of_connecting(name: str, late: int) -> None:
    connecting_s, late_s = 0.4, 1.5
    with joined(2, timeout_s=connecting_s) as parts:
        for part in parts:
            Groups.set_limit(part.group, timedelta(seconds=LIMIT_S))
        ends = [GroupTransport(CPU, part, LIMIT_S) for part in parts]

        def call(rank: int) -> None:
            if rank == late:
                time.sleep(late_s)
            CALLS[name](ends[rank])

        together(2, call)
        for end in ends:
            end.close()


# Words and numbers


@for_each("size", [1, 2, 3])
def test_all_get_the_words_of_all_in_their_order(size: int) -> None:
    with transports(size) as ends:
        assert [(end.rank, end.size) for end in ends] == [(rank, size) for rank in range(size)]
        for length in (0, 1, 100_000):
            words = [bytes([rank]) * length for rank in range(size)]
            said = together(size, lambda rank, words=words: ends[rank].meet(words[rank]))
            assert said == [words] * size


@pytest.mark.parametrize("numel", [0, 1, 5])
def test_rows_are_shared_with_their_bits(pair: Pair, numel: int) -> None:
    def row(rank: int) -> torch.Tensor:
        return torch.tensor([-0.0, torch.nan, rank / 3, 5e-324, torch.inf])[:numel].double()

    shared = together(2, lambda rank: pair[rank].share({rank: row(rank)}))
    wanted = torch.stack([row(rank) for rank in range(2)])
    for table in shared:
        assert table.shape == (2, numel)
        assert table.view(torch.int64).equal(wanted.view(torch.int64))


@pytest.mark.parametrize("sizes", [(0, 0), (3, 0), (1, 200)], ids=str)
def test_texts_of_any_length_are_gathered(
    pair: Pair, sizes: tuple[int, int], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(GroupTransport, "frame_bytes", 64)
    texts = [bytes(range(rank, rank + size)) for rank, size in enumerate(sizes)]
    assert together(2, lambda rank: pair[rank].gather_bytes({rank: texts[rank]})) == [texts] * 2


TYPES = [torch.float32, torch.bool, torch.uint16, torch.float8_e4m3fn, torch.bfloat16]


@pytest.mark.parametrize("dtype", TYPES, ids=str)
def test_tensors_of_any_type_follow_the_lead(pair: Pair, dtype: torch.dtype) -> None:
    own = [[torch.full((3,), rank).to(dtype), torch.zeros(0, dtype=dtype)] for rank in (1, 0)]
    together(2, lambda rank: pair[rank].follow_lead(own[rank]))
    assert own[1][0].float().tolist() == [1.0] * 3


# Tensors on their way


def test_everyone_begins_with_its_neighbour() -> None:
    with transports(3) as ends:
        assert [end.peers() for end in ends] == [[1, 2], [2, 0], [0, 1]]


def test_tensors_go_to_the_one_that_needs_them() -> None:
    with transports(3) as ends:
        coming = [torch.zeros(3, 2) for _ in range(3)]

        def move(rank: int) -> None:
            operations = []
            for peer in ends[rank].peers():
                leaving = torch.tensor([10.0 * rank, peer])
                operations.append(Operation(True, peer, leaving))
                operations.append(Operation(False, peer, coming[rank][peer]))
            ends[rank].move(operations).finish()

        together(3, move)
        for rank in range(3):
            wanted = [[10.0 * peer, rank] if peer != rank else [0, 0] for peer in range(3)]
            assert coming[rank].tolist() == wanted


def test_tensors_of_nothing_do_not_travel(pair: Pair, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(dist, "batch_isend_irecv", None)
    pair[0].move([]).finish()
    pair[0].move([Operation(True, 1, torch.zeros(0)), Operation(False, 1, torch.zeros(0))]).finish()


def test_first_chunks_go_first_and_receipts_before_what_leaves(
    pair: Pair, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of two that both began with what they send, gloo would let one wait for the other."""
    started: list[dist.P2POp] = []
    monkeypatch.setattr(dist, "batch_isend_irecv", lambda ops: started.extend(ops) or [])
    places = [(True, 1), (True, 0), (False, 1), (True, None), (False, 0), (False, None)]
    sizes = {place: 1 + number for number, place in enumerate(places)}
    pair[0].move(
        [
            Operation(sends, 1, torch.zeros(numel, dtype=torch.uint8), chunk)
            for (sends, chunk), numel in sizes.items()
        ]
    )
    wanted = [(False, None), (True, None), (False, 0), (True, 0), (False, 1), (True, 1)]
    assert [op.tensor.numel() for op in started] == [sizes[place] for place in wanted]
    assert [op.op is dist.isend for op in started] == [sends for sends, _ in wanted]


# Between steps


def test_the_lead_sees_the_room_of_everybody() -> None:
    with transports(3) as ends:

        def bring(rank: int) -> list[list[int]]:
            ends[rank].room(3 + rank)[: 3 + rank] = 40 + rank
            return [memory.tolist() for memory in ends[rank].bring()]

        brought, *others = together(3, bring)
        assert brought == [[40] * 3, [41] * 4, [42] * 5]
        assert others == [[], []]


def test_a_room_of_nothing_can_be_brought(pair: Pair) -> None:
    for end in pair:
        end.room(0)
    brought, _ = together(2, lambda rank: pair[rank].bring())
    assert [memory.numel() for memory in brought] == [0, 0]


@pytest.mark.parametrize("rank", [0, 1])
def test_there_is_nothing_to_bring_before_a_room_was_filled(pair: Pair, rank: int) -> None:
    with pytest.raises(ValueError, match="there is nothing to bring: fill a room first"):
        pair[rank].bring()


@for_each("least", [0, 1])
def test_everybody_gets_what_was_made_for_it(least: int) -> None:
    with transports(3) as ends:

        def make(rank: int) -> torch.Tensor:
            return torch.full((least + rank,), 60 + rank, dtype=torch.uint8)

        given = together(3, lambda rank: ends[rank].hand_out(None if rank else make).tolist())
        assert given == [make(rank).tolist() for rank in range(3)]


# Those who are gone


@pytest.fixture
def _no_last_words(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(collective, "_LAST_WORDS_S", 0.05)


def test_who_fails_is_quoted(pair: Pair) -> None:
    for end in pair:
        end.begin_step(5)
    pair[1].close(ArithmeticError("over the top"))
    error = pair[0]._explain(RuntimeError("Connection closed by peer"))
    assert type(error) is PeerFailed
    assert str(error) == "device 1 failed in step 5: ArithmeticError: over the top"
    assert (error.device, error.step) == (1, 5)


def test_the_first_failure_counts() -> None:
    with transports(3) as ends:
        ends[2].close(KeyError("weight"))
        ends[1].close(ValueError("another one, because of the first"))
        error = ends[0]._explain(RuntimeError("Connection reset by peer"))
        assert str(error) == "device 2 failed in step 1: KeyError: 'weight'"


def test_who_leaves_because_another_one_failed_says_nothing(pair: Pair) -> None:
    """The others know it from the one that did."""
    pair[1].close(PeerLost("device 0 is gone", device=0))
    assert pair[1]._store.check([collective._FAILURE_KEY]) is False


def test_a_failure_of_many_words_is_cut(pair: Pair) -> None:
    pair[1].close(ValueError("é" * 100_000))
    error = pair[0]._explain(RuntimeError("Connection closed by peer"))
    assert str(error) == f"device 1 failed in step 1: ValueError: {'é' * 4000}"


def test_who_fails_cuts_its_connections(pair: Pair, monkeypatch: pytest.MonkeyPatch) -> None:
    """Or those who wait for it would wait up to the limit."""
    cut: list[int] = []
    for rank, end in enumerate(pair):
        monkeypatch.setattr(end._connections, "cut", lambda rank=rank: cut.append(rank))
    pair[0].close()
    assert cut == []
    pair[1].close(ValueError("over"))
    assert cut == [1]


@pytest.mark.usefixtures("_no_last_words")
def test_who_does_not_come_is_named_at_the_limit() -> None:
    with transports(2, timeout_s=1.5) as ends:
        ends[0].begin_step(4)
        words = "^device 1 did not arrive within 1.5 s in step 4, where device 0 waits"
        with pytest.raises(PeerTimeout, match=words) as caught:
            ends[0].meet(b"here")
        assert (caught.value.device, caught.value.step) == (1, 4)


def test_a_store_that_is_gone_is_no_error_for_who_fails(
    pair: Pair, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    class Gone:
        def compare_set(self, *_: object) -> None:
            raise RuntimeError("Broken pipe")

    monkeypatch.setattr(pair[1], "_store", Gone())
    pair[1].close(ValueError("over"))
    assert "device 1 could not tell the others of its failure: Broken pipe" in caplog.text


@pytest.mark.usefixtures("_no_last_words")
def test_a_stopped_device_is_named_first(pair: Pair, monkeypatch: pytest.MonkeyPatch) -> None:
    """The store may be with it: it is not asked."""
    pair[0]._watch.stopped, pair[0]._watch.pids = 1, {1: 4321}
    monkeypatch.setattr(pair[0], "_store", None)
    error = pair[0]._explain(RuntimeError("Connection reset by peer"))
    assert str(error).startswith("device 1 (process 4321) is stopped")


@pytest.mark.usefixtures("_no_last_words")
def test_who_has_come_to_the_end_of_its_script_is_named(
    pair: Pair, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(pair[0], "_who_left", lambda: [1])
    error = pair[0]._explain(RuntimeError("Connection reset by peer"))
    assert type(error) is PeerLost
    assert str(error).startswith("device 1 ended: its script came to an end before the others'")
    assert error.device == 1


@pytest.mark.usefixtures("_no_last_words")
@pytest.mark.parametrize(
    "error",
    [
        RuntimeError("[gloo/transport/tcp/pair.cc:547] closed"),
        RuntimeError("NCCL error: unhandled system error"),
        RuntimeError("Connection reset by peer"),
        dist.DistBackendError("whatever it says"),
    ],
    ids=str,
)
def test_an_error_of_a_backend_is_one_of_a_peer(pair: Pair, error: RuntimeError) -> None:
    words = "^device 0 lost the connection to another device in step 1: " + re.escape(str(error))
    with pytest.raises(PeerError, match=words) as caught, pair[0]._naming_the_lost():
        raise error
    assert caught.value.__cause__ is error


@pytest.mark.parametrize(
    "error",
    [
        RuntimeError("expected tensors of one shape"),
        torch.OutOfMemoryError("NCCL has no room"),
    ],
    ids=str,
)
def test_any_other_error_is_left_as_it_is(pair: Pair, error: RuntimeError) -> None:
    pair[0].begin_step(3)
    with pytest.raises(type(error), match=str(error)) as caught, pair[0]._naming_the_lost():
        raise error
    assert caught.value is error
    assert error.__notes__ == ["raised in step 3, on device 0"]


def test_who_has_left_is_of_no_use_and_may_leave_again(pair: Pair) -> None:
    pair[1].room(3)
    pair[1].close()
    pair[1].close()
    for call in (
        pair[1].meet,
        pair[1].bring,
        lambda: pair[1].hand_out(None),
        lambda: pair[1].share({1: torch.zeros(1, dtype=torch.float64)}),
        lambda: pair[1].move([Operation(True, 0, torch.ones(1))]),
    ):
        with pytest.raises(OnefoldError, match="this trainer has left its run"):
            call()


# Moving


class Work:
    """Notes when it is waited for; gloo would hang the second time."""

    def __init__(self, name: str, waited: list[str]) -> None:
        self._name = name
        self._waited = waited

    def wait(self, limit: timedelta | None = None) -> None:
        assert self._name not in self._waited
        self._waited.append(self._name)


def operations() -> list[Operation]:
    part = torch.zeros(1)
    return [
        Operation(False, 1, part, None),
        Operation(False, 1, part, 0),
        Operation(False, 2, part, 0),
        Operation(True, 1, part, 0),
        Operation(False, 1, part, 1),
    ]


@for_each(
    ("names", "after_first_chunk"),
    [(["row", "1", "2", "out", "3"], ["1", "2"]), (["all"], ["all"])],
)
def test_each_is_waited_for_once(names: list[str], after_first_chunk: list[str]) -> None:
    waited: list[str] = []
    works = cast(Any, [Work(name, waited) for name in names])
    moving = Moving(operations(), works, timedelta(seconds=LIMIT_S))
    moving.wait_for(0)
    assert waited == after_first_chunk
    moving.wait_for(0)
    moving.wait_for(1)
    moving.finish()
    moving.finish()
    assert sorted(waited) == sorted(names)
