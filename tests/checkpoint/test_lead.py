"""What the lead does alone while others wait: they hear that it is at work, and what came of it."""

import re
import threading
import time
from collections.abc import Callable, Mapping
from threading import BrokenBarrierError
from types import SimpleNamespace
from typing import Any, TypeVar

import pytest
import torch

from onefold.checkpoint.saving import LeadWork
from tests.exchange.together import endings, together
from tests.step.assembled import devices_of

Result = TypeVar("Result")
LIMIT_S = 0.2


class Table:
    """What two devices, which are threads, show each other, and how often."""

    def __init__(self) -> None:
        self.barrier = threading.Barrier(2, timeout=20)
        self.given: dict[int, torch.Tensor] = {}
        self.rounds = 0

    def all_gather_rows(self, rows: Mapping[int, torch.Tensor]) -> torch.Tensor:
        self.rounds += 0 in rows
        self.given.update(rows)
        self.barrier.wait()
        table = torch.stack([self.given[0], self.given[1]])
        self.barrier.wait()
        return table


def seated(table: Table, work: Callable[[LeadWork], Result]) -> Callable[[int], Result]:
    """Does the lead's work on a device; whoever fails is waited for no longer."""

    def start(number: int) -> Result:
        exchange = SimpleNamespace(transport=table)
        engine: Any = SimpleNamespace(context=SimpleNamespace(with_others=True, exchange=exchange))
        try:
            return work(LeadWork(engine, devices_of(2, own=[number]), LIMIT_S))
        except BaseException:
            table.barrier.abort()
            raise

    return start


def test_all_hear_while_it_takes_longer_than_they_wait(caplog: pytest.LogCaptureFixture) -> None:
    """Otherwise they would give the lead up for lost."""

    def work(lead: LeadWork) -> None:
        lead.do("reading", (lambda: time.sleep(3 * LIMIT_S)) if lead.is_here else None)

    table = Table()
    together(2, seated(table, work))
    assert table.rounds >= 6  # it looks four times as often as they would give up
    said = [
        re.match(r"reading has taken \d+ s so far and is still running", m) for m in caplog.messages
    ]
    assert all(said)
    assert 1 <= len(said) < table.rounds


def test_a_lead_that_hears_of_anothers_failure_still_ends_its_thread() -> None:
    ended: list[bool] = []

    def work(lead: LeadWork) -> object:
        if not lead.is_here:
            raise ArithmeticError("mine")

        def slow() -> None:
            time.sleep(0.3)
            ended.append(True)

        return lead.do("writing", slow)

    found = endings(2, seated(Table(), work))
    assert [type(error) for error in found] == [BrokenBarrierError, ArithmeticError]
    assert ended == [True]
