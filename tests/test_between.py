"""What may be done between two steps: wait, report values, draw random numbers."""

from __future__ import annotations

import random

import numpy as np
import pytest
import torch

import onefold
from onefold.core.wire import decode, encode
from onefold.errors import DisagreementError, PeerFailed, RunFailed
from onefold.testing import outcomes
from tests import simulated
from tests.between import (
    drawing,
    exchange_of,
    exchanged,
    late,
    mine,
    not_sendable_by_the_lead,
    not_sendable_on_one,
    shown,
)
from tests.inside import engine_in
from tests.small import make_trainer
from tests.tables import for_each

by_either = pytest.mark.parametrize("exchange", ["shared", "collective"])


@for_each("devices", [1, 3])
def test_devices_of_one_process_have_its_value(devices: int) -> None:
    trainer = make_trainer(devices=devices)
    value = mine(2)
    found = trainer.gather(value)
    assert len(found) == devices
    for each in (*found, trainer.broadcast(value)):
        assert shown(each) == shown(decode(encode(value, "value")))
    found[0]["tensor"].zero_()
    assert devices == 1 or bool(found[1]["tensor"].any())
    assert bool(value["tensor"].any())


@pytest.mark.full
@pytest.mark.processes
@by_either
def test_every_process_learns_every_value(exchange: str) -> None:
    gathered, sent, fingerprint, numbers = exchange_of(exchanged, exchange)
    assert gathered == [shown(decode(encode(mine(rank), "value"))) for rank in range(3)]
    assert sent == shown(decode(encode(mine(2), "value")))
    assert fingerprint == exchanged()[2]
    assert numbers == [{"rank": 0.0}, {"rank": 1.0}, {"rank": 2.0}]


@pytest.mark.full
@pytest.mark.processes
def test_a_device_that_does_not_come_is_named() -> None:
    with pytest.raises(RunFailed, match="device 1"):
        onefold.launch(late, devices="cpu:2", timeout_s=3)


@pytest.mark.full
@pytest.mark.processes
def test_what_cannot_be_sent_leaves_nobody_waiting() -> None:
    with pytest.raises(RunFailed, match=r"TypeError: the value\['value'\] is of type object"):
        onefold.launch(not_sendable_on_one, devices="cpu:2", timeout_s=300)


def test_what_the_lead_cannot_send_leaves_nobody_waiting() -> None:
    words = r"the value\['model'\] is of type Linear.*its state_dict\(\)"
    lead, other = outcomes(not_sendable_by_the_lead, 2)
    with pytest.raises(TypeError, match=words):
        raise lead.error
    with pytest.raises(PeerFailed, match=words):
        raise other.error


def test_dicts_of_numbers_are_floats_of_the_same_names() -> None:
    trainer = make_trainer()
    given = {"a": 1, "b": True, "c": np.float32(0.5), "d": torch.tensor(2.0)}
    (found,) = trainer.gather(given)
    assert [type(value) for value in found.values()] == [float] * 4
    (mixed,) = trainer.gather({**given, "e": "text"})
    assert type(mixed["a"]) is int


def test_the_calls_are_allowed_while_averages_are_shown() -> None:
    trainer = make_trainer(devices=2)
    trainer.average(mean=True)
    with trainer.averaged():
        trainer.barrier()
        assert trainer.broadcast(3) == 3


def test_they_are_refused_where_devices_may_differ() -> None:
    trainer = make_trainer()
    for call in (trainer.broadcast, lambda: trainer.gather(1), trainer.barrier):
        with pytest.raises(RuntimeError, match="was called inside"), trainer.changing():
            call()


# Random numbers


def test_a_fork_restores_every_generator_and_goes_on_inside() -> None:
    trainer = make_trainer()

    def draws() -> list[float]:
        return [float(torch.rand(())), random.random(), np.random.normal(), random.gauss(0, 1)]

    for _ in range(3):  # an odd and an even number of normal numbers
        with trainer.fork_rng():
            inside = draws()
        assert draws() == inside


def test_what_the_lead_draws_alone_shifts_nobody() -> None:
    with pytest.raises(
        DisagreementError, match=r"another batch than device 0.*with trainer.fork_rng\(\)"
    ):
        simulated.launch(drawing, devices="cpu:2", args=(False,))
    assert simulated.launch(drawing, devices="cpu:2", args=(True,)) == drawing(True)


def test_names_differ(monkeypatch: pytest.MonkeyPatch) -> None:
    trainer = make_trainer(devices=2)
    transport = engine_in(trainer).exchange.transport
    texts = [encode({"a": 1.0}, "value"), encode({"b": 1.0}, "value")]
    monkeypatch.setattr(transport, "gather_bytes", lambda own: texts)
    with pytest.raises(DisagreementError, match=r"^device 1 has \['b'\] and another one \['a'\]"):
        trainer.gather({"a": 1.0})
