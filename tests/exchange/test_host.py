"""What processes of one host hand to each other between steps."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import pytest
import torch

from onefold.errors import OnefoldError, PeerFailed, PeerLost
from onefold.exchange.shared import HostTransport
from tests.exchange.together import endings, mailboxes, together

Make = Callable[[int], torch.Tensor]


@contextmanager
def hosted(size: int) -> Iterator[list[HostTransport]]:
    with mailboxes(size) as boxes:
        ends = [HostTransport(box) for box in boxes]
        yield ends
        for end in ends:
            end.close()


@pytest.fixture
def pair() -> Iterator[list[HostTransport]]:
    with hosted(2) as ends:
        yield ends


@pytest.fixture(autouse=True)
def _closes_what_it_opens() -> Iterator[None]:
    before = os.listdir("/proc/self/fd")
    yield
    assert os.listdir("/proc/self/fd") == before


def filled(end: HostTransport, nbytes: int, value: int) -> torch.Tensor:
    room = end.room(nbytes)
    room[:nbytes] = value
    return room


def given(make: Make) -> Callable[[HostTransport, int], list[int]]:
    return lambda end, rank: end.hand_out(make if rank == 0 else None).tolist()


def test_words_are_met_with_and_the_step_is_noted_in_the_mailbox() -> None:
    with hosted(3) as ends:
        for end in ends:
            end.begin_step(6)
        words = together(3, lambda rank: list(ends[rank].meet(bytes([rank]))))
        assert words == [[b"\0", b"\1", b"\2"]] * 3
        assert [(end.step, end.mailbox.step) for end in ends] == [(6, 6)] * 3


# To the lead


def test_the_lead_sees_the_room_of_everybody() -> None:
    with hosted(3) as ends:

        def bring(rank: int) -> list[list[int]]:
            filled(ends[rank], 3 + rank, 40 + rank)
            brought = ends[rank].bring()
            return [memory[: 3 + n].tolist() for n, memory in enumerate(brought)]

        brought, *others = together(3, bring)
        assert brought == [[40] * 3, [41] * 4, [42] * 5]
        assert others == [[], []]


def test_rooms_are_not_copied(pair: list[HostTransport]) -> None:
    rooms = [filled(end, 8, 1) for end in pair]
    brought, _ = together(2, lambda rank: pair[rank].bring())
    rooms[0][3], rooms[1][3] = 5, 6
    assert [memory[3].item() for memory in brought] == [5, 6]


def test_a_room_is_the_same_memory_until_a_larger_one_is_needed(pair: list[HostTransport]) -> None:
    first = filled(pair[0], 100, 7)
    assert pair[0].room(20).data_ptr() == first.data_ptr()
    larger = pair[0].room(101)
    assert larger.numel() >= 101
    assert not larger.any()
    larger[:] = 1
    assert bool((first == 7).all()), "what was brought before is not written over by a new room"


def test_a_room_of_nothing_can_be_brought(pair: list[HostTransport]) -> None:
    for end in pair:
        end.room(0)
    brought, _ = together(2, lambda rank: pair[rank].bring())
    assert len(brought) == 2


@pytest.mark.parametrize("rank", [0, 1])
def test_there_is_nothing_to_bring_before_a_room_was_filled(
    pair: list[HostTransport], rank: int
) -> None:
    with pytest.raises(ValueError, match="there is nothing to bring: fill a room first"):
        pair[rank].bring()


# From the lead


def test_everybody_gets_what_was_made_for_it() -> None:
    with hosted(3) as ends:
        asked: list[int] = []

        def make(rank: int) -> torch.Tensor:
            asked.append(rank)
            return torch.full((rank + 1,), 60 + rank, dtype=torch.uint8)

        call = given(make)
        assert together(3, lambda rank: call(ends[rank], rank)) == [[60], [61] * 2, [62] * 3]
        assert sorted(asked) == [0, 1, 2], "each is made once"


def test_nothing_can_be_handed_out(pair: list[HostTransport]) -> None:
    call = given(lambda rank: torch.empty(0, dtype=torch.uint8))
    lead, other = together(2, lambda rank: call(pair[rank], rank))
    assert lead == []
    assert len(other) <= 1, "there may be bytes behind it"


def test_what_was_handed_out_is_everybodys_own(pair: list[HostTransport]) -> None:
    source = torch.zeros(4, dtype=torch.uint8)
    _, got = together(2, lambda rank: pair[rank].hand_out(None if rank else lambda _: source))
    source.fill_(9)
    assert got.tolist() == [0] * 4


def test_an_error_while_it_is_made_closes_what_was_opened(pair: list[HostTransport]) -> None:
    def make(rank: int) -> torch.Tensor:
        raise ArithmeticError("nothing can be made")

    def call(rank: int) -> None:
        try:
            pair[rank].hand_out(None if rank else make)
        except ArithmeticError as error:
            pair[rank].close(error)
            raise

    errors = endings(2, call)
    assert [type(error) for error in errors] == [ArithmeticError, PeerFailed]
    assert "ArithmeticError: nothing can be made" in str(errors[1])


def test_a_lead_whose_peer_is_gone_names_it(pair: list[HostTransport]) -> None:
    pair[1].close()
    with pytest.raises(PeerLost, match="device 1"):
        pair[0].hand_out(lambda rank: torch.zeros(3, dtype=torch.uint8))


def test_a_device_whose_lead_is_gone_names_it(pair: list[HostTransport]) -> None:
    pair[0].close()
    pair[1].room(3)
    with pytest.raises(PeerLost, match="device 0"):
        pair[1].bring()
    with pytest.raises(PeerLost, match="device 0"):
        pair[1].hand_out(None)


# The end


def test_who_leaves_for_a_failure_says_why(pair: list[HostTransport]) -> None:
    pair[1].begin_step(3)
    pair[1].close(ArithmeticError("over the top"))
    with pytest.raises(PeerFailed, match="device 1 failed in step 3: ArithmeticError: over the"):
        pair[0].meet()


def test_who_has_left_may_leave_again_and_is_of_no_use(pair: list[HostTransport]) -> None:
    pair[1].room(10)
    pair[1].close()
    pair[1].close(ValueError("again"))
    for call in (pair[1].meet, lambda: pair[1].hand_out(None)):
        with pytest.raises(OnefoldError, match="this trainer has left its run"):
            call()
