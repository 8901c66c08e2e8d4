"""What the lead does alone while others wait: they hear that it is at work, and what came of it."""

from __future__ import annotations

import time
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any, TypeVar

import pytest

from onefold.checkpoint.saving import Lead
from onefold.errors import PeerLost
from tests.engine.assembled import team_of
from tests.engine.meeting import Seat, together

Result = TypeVar("Result")


LIMIT_S = 0.2


def both(work: Callable[[Lead, Seat], Result]) -> list[Result | Exception]:
    """In two processes, with engines that have nothing but their exchange."""

    def start(seat: Seat) -> Result:
        engine: Any = SimpleNamespace(with_others=True, exchange=SimpleNamespace(transport=seat))
        return work(Lead(engine, team_of(2, own=[seat.number]), LIMIT_S), seat)

    return together(start)


def test_all_hear_while_it_takes_longer_than_they_wait(caplog: pytest.LogCaptureFixture) -> None:
    """Otherwise they would give the lead up for lost."""

    def work(lead: Lead, seat: Seat) -> int:
        lead.do("reading", (lambda: time.sleep(3 * LIMIT_S)) if lead.is_here else None)
        return seat.rounds

    one, other = both(work)
    assert one == other
    assert isinstance(one, int)
    assert one >= 6  # it looks four times as often as they would give up
    said = [m for m in caplog.messages if m.startswith("reading has taken 0 s so far, and goes on")]
    assert 1 <= len(said) <= 3
    assert len(said) == len(caplog.messages)


def test_a_lead_that_hears_of_anothers_failure_still_ends_its_thread() -> None:
    ended: list[bool] = []

    def work(lead: Lead, seat: Seat) -> object:
        if seat.number == 1:
            raise ArithmeticError("mine")

        def slow() -> None:
            time.sleep(0.3)
            ended.append(True)

        return lead.do("writing", slow)

    one, other = both(work)
    assert isinstance(one, PeerLost)
    assert isinstance(other, ArithmeticError)
    assert ended == [True]
