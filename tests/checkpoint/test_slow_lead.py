"""Reading and writing that takes longer than devices wait for each other ends no run."""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest import mock

import pytest

import onefold
from onefold.checkpoint import model, resume, saving
from onefold.core.options import ExchangeName, RunOptions
from onefold.errors import PeerFailed
from onefold.testing import outcomes
from tests.small import make_trainer, points
from tests.tables import for_each

LIMIT_S = 6.0
SLOW_S = 7.5


def slowly(call: Callable[..., Any]) -> Callable[..., Any]:
    def slow(*arguments: Any, **options: Any) -> Any:
        time.sleep(SLOW_S)
        return call(*arguments, **options)

    return slow


def save_twice(directory: Path) -> str:
    """The second one, and a load, wait for the first, which is written beside training."""
    with mock.patch.object(saving, "write_checkpoint", slowly(saving.write_checkpoint)):
        trainer = make_trainer(devices=None)
        for wait in (False, False, True):
            trainer.step(points(8))
            trainer.save(directory, wait=wait)
        trainer.step(points(8))
        trainer.save(directory, wait=False)
        found = trainer.load(directory)
        return f"{found.step} {trainer.fingerprint()}"


def go_on(directory: Path, slow: str) -> str:
    trainer = make_trainer(devices=None)
    places = {"find_checkpoint": resume, "fill": model.ModelFiles, "take_apart": model}
    with mock.patch.object(places[slow], slow, slowly(getattr(places[slow], slow))):
        found = trainer.load(directory)
    trainer.step(points(8))
    return f"{found.step} {trainer.fingerprint()}"


@pytest.mark.full
@pytest.mark.processes
@pytest.mark.parametrize(
    ("exchange", "slow"),
    [
        *(("collective", ""), ("shared", ""), ("collective", "find_checkpoint")),
        *(("shared", "fill"), ("collective", "take_apart")),
    ],
)
def test_writing_and_reading_may_take_longer_than_a_device_waits(
    tmp_path: Path, exchange: ExchangeName, slow: str
) -> None:
    choices: Any = {"devices": "cpu:2", "exchange": exchange, "timeout_s": LIMIT_S}
    if not slow:
        assert onefold.launch(save_twice, args=(tmp_path,), **choices).startswith("4 ")
        return
    trainer = make_trainer()
    trainer.step(points(8))
    trainer.save(tmp_path)
    trainer.step(points(8))
    said = onefold.launch(go_on, args=(tmp_path, slow), **choices)
    assert said == f"1 {trainer.fingerprint()}"


def load(directory: Path) -> None:
    make_trainer(devices=None).load(directory)


@for_each("exchange", ["shared", "collective"])
def test_what_fails_in_the_leads_work_ends_all(tmp_path: Path, exchange: ExchangeName) -> None:
    make_trainer().save(tmp_path)
    fail = mock.Mock(side_effect=ArithmeticError("the fault that was asked for"))
    with mock.patch.object(resume, "find_checkpoint", fail):
        lead, other = outcomes(load, 2, args=(tmp_path,), options=RunOptions(exchange=exchange))
    assert fail.call_count == 1
    assert isinstance(lead.error, ArithmeticError)
    with pytest.raises(PeerFailed, match="ArithmeticError: the fault that was asked for"):
        raise other.error
