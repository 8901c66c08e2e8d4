"""What the lead does alone while others wait: they hear that it is at work, and what came of it."""

from __future__ import annotations

import time
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any, TypeVar, cast

import pytest

from onefold.checkpoint.saving import Lead
from onefold.errors import PeerLost
from tests.engine.assembled import team_of
from tests.engine.meeting import Seat, together

Result = TypeVar("Result")


def lead_at(seat: Seat, timeout_s: float = 10.0) -> Lead:
    """One of two processes, with an engine that has nothing but its exchange."""
    engine = SimpleNamespace(with_others=True, exchange=SimpleNamespace(transport=seat))
    return Lead(cast(Any, engine), team_of(2, own=[seat.number]), timeout_s)


def both(work: Callable[[Lead, Seat], Result], timeout_s: float = 10.0) -> list[Result | Exception]:
    return together(lambda seat: work(lead_at(seat, timeout_s), seat))


def test_the_work_and_its_result_are_the_leads_alone(caplog: pytest.LogCaptureFixture) -> None:
    """Even where others were given some."""
    did: list[int] = []

    def work(lead: Lead, seat: Seat) -> object:
        lead.do("it", lambda: did.append(seat.number))
        return lead.do("it", (lambda: 7) if lead.is_here else None), lead.share(1.5 + seat.number)

    assert both(work) == [(7, 1.5), (None, 1.5)]
    assert did == [0]
    assert not caplog.messages, "quick work is not mentioned"


def test_all_hear_while_it_takes_longer_than_they_wait(caplog: pytest.LogCaptureFixture) -> None:
    """Otherwise they would give the lead up for lost."""
    limit_s = 0.2

    def work(lead: Lead, seat: Seat) -> int:
        lead.do("reading", (lambda: time.sleep(3 * limit_s)) if lead.is_here else None)
        return seat.rounds

    one, other = both(work, limit_s)
    assert one == other
    assert isinstance(one, int)
    assert one >= 6  # it looks four times as often as they would give up
    said = [m for m in caplog.messages if m.startswith("reading has taken 0 s so far, and goes on")]
    assert 1 <= len(said) <= 3
    assert len(said) == len(caplog.messages)


def test_what_fails_there_is_raised_on_the_lead_and_the_others_hear_of_it() -> None:
    def fail() -> None:
        raise ArithmeticError("the disk is gone")

    one, other = both(lambda lead, _: lead.do("writing", fail if lead.is_here else None))
    assert isinstance(one, ArithmeticError)
    assert str(one) == "the disk is gone"
    assert isinstance(other, PeerLost)


def test_a_lead_that_hears_of_anothers_failure_still_ends_its_thread() -> None:
    ended: list[bool] = []

    def work(lead: Lead, seat: Seat) -> object:
        if seat.number == 1:
            raise ArithmeticError("mine")

        def slow() -> None:
            time.sleep(0.3)
            ended.append(True)

        return lead.do("writing", slow)

    one, other = both(work, 0.2)
    assert isinstance(one, PeerLost)
    assert isinstance(other, ArithmeticError)
    assert ended == [True]
