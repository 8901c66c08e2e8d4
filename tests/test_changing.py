"""What is changed between steps in `trainer.changing` has one result on any number of devices."""

from __future__ import annotations

import pytest
import torch

from tests import simulated
from tests.changes import CHANGES, run, run_all
from tests.small import bits, make_trainer, points
from tests.tables import for_each


@for_each("exchange", ["shared", "collective"])
def test_every_process_has_the_leads_changes(exchange: str) -> None:
    found = simulated.launch(run_all, devices="cpu:3", exchange=exchange)
    assert found == {key: run(*key, devices=1) for key in found}
    assert len(found) == 2 * len(CHANGES)


@for_each("name", CHANGES)
def test_every_device_of_a_process_has_them(name: str) -> None:
    assert run(name, False, devices=3) == run(name, False, devices=1)


def test_calls_of_the_trainer_in_the_block_are_refused() -> None:
    trainer = make_trainer()
    with (
        pytest.raises(RuntimeError, match=r"trainer.step was called inside .* the block to end"),
        trainer.changing(),
    ):
        trainer.step(points(8))


def test_an_exception_in_the_block_is_the_users() -> None:
    model = make_trainer().model
    trainer = make_trainer(torch.nn.Linear(3, 1))
    with pytest.raises(KeyError, match="mine"), trainer.changing():
        raise KeyError("mine")
    assert bits(model)


def test_a_barrier_alone_is_nothing() -> None:
    trainer = make_trainer(devices=2)
    trainer.barrier()
    assert trainer.steps == 0
