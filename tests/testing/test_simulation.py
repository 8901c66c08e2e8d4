"""Simulated devices have the bits of one, whatever their order, and fail as processes do."""

import functools
import os
import random
import resource
import threading
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn
from torch.distributed import distributed_c10d

import onefold
from onefold.core.options import ExchangeName, RunOptions
from onefold.errors import DisagreementError, PeerError, PeerFailed, PeerLost
from onefold.launcher.environment import current_context
from onefold.testing import Ended, Fault, outcomes, simulate
from tests.tables import for_each

STEPS = 3
EXCHANGES: tuple[ExchangeName, ...] = ("shared", "collective")


def loss(model: nn.Module, batch: torch.Tensor) -> torch.Tensor:
    return model(batch).square().mean(dim=1)


def trained(steps: int = STEPS) -> tuple[str, str]:
    """A model with buffers, dropout, and a layer of several segments."""
    torch.manual_seed(0)
    layers = [nn.Linear(6, 300), nn.BatchNorm1d(300), nn.Dropout(0.1), nn.Linear(300, 5)]
    model = nn.Sequential(*layers, nn.Tanh())
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    trainer = onefold.Trainer(model, optimizer, loss, shards=5, threads=1, clip_norm=0.1)
    last = [trainer.step(torch.randn(11, 6)) for _ in range(steps)][-1]
    return trainer.fingerprint(), float(last.loss).hex()


@functools.cache
def reference() -> tuple[str, str]:
    (found,) = simulate(trained, devices=1)
    return found


@for_each("exchange", EXCHANGES)
@for_each("placement", ["replicate", "partition", "offload", "pipeline"])
def test_the_bits_are_those_of_one_device(exchange: ExchangeName, placement: str) -> None:
    for devices, seed in ((2, 0), (3, 1)):
        found = simulate(trained, devices, seed=seed, placement=placement, exchange=exchange)
        assert found == [reference()] * devices


def test_the_bits_are_those_of_a_process() -> None:
    assert onefold.launch(trained, devices="cpu:2", timeout_s=300) == reference()


@for_each(
    ("exchange", "placement", "kind"),
    [
        *(
            ("shared", "replicate", "kill"),
            ("shared", "replicate", "stop"),
            ("shared", "partition", "kill"),
        ),
        *(("collective", "replicate", "cut"), ("collective", "replicate", "kill")),
    ],
)
def test_a_device_that_is_lost_ends_the_run_on_all(
    exchange: ExchangeName, placement: str, kind: str
) -> None:
    """At every call: the others end with an error that says so, or had all that they needed."""
    options = RunOptions(exchange=exchange, placement=placement)
    unhurt = outcomes(trained, 3, options=options)
    (well,), calls = {each.value for each in unhurt}, unhurt[1].calls
    ended_early = 0
    for call in range(1, calls + 1, 7 if placement == "replicate" else 31):
        fault = Fault(device=1, call=call, kind=kind)  # type: ignore[arg-type]
        found = outcomes(trained, 3, seed=call, options=options, faults=[fault])
        assert found[1].was_killed == (kind != "cut")
        for each in (found[0], found[2]):
            assert each.value == well or isinstance(each.error, PeerError), (call, each.error)
        errors = [str(found[n].error) for n in (0, 2) if found[n].error is not None]
        ended_early += len(errors) == 2
        if kind == "stop" and errors:
            assert any("device 1" in error for error in errors)
    assert ended_early > 0


@for_each("exchange", EXCHANGES)
def test_a_late_device_changes_nothing(exchange: ExchangeName) -> None:
    options = RunOptions(exchange=exchange, placement="partition")
    for call in range(1, 40, 5):
        faults = [Fault(device=call % 3, call=call, kind="delay")]
        found = outcomes(trained, 3, seed=call, options=options, faults=faults)
        assert [each.value for each in found] == [reference()] * 3


def test_a_device_that_fails_or_never_comes_is_the_one_that_is_named() -> None:
    def fails() -> None:
        trained(1)
        if not current_context().rank:
            raise ArithmeticError("over the top")
        trained(1)

    def stays_away() -> None:
        if current_context().rank != 2:
            trained(1)

    with pytest.raises(ArithmeticError) as caught:
        simulate(fails, 3)
    assert caught.value.__notes__ == ["raised on simulated device 0 of 3, with seed 0"]
    assert all(isinstance(each.error, PeerLost | PeerFailed) for each in outcomes(fails, 3)[1:])
    *found, away = outcomes(stays_away, 3)
    assert away == Ended(calls=0)
    for each in found:
        assert isinstance(each.error, PeerError)
        assert each.error.device == 2


def test_generators_and_groups_are_each_devices_own() -> None:
    """And what the caller has is left alone."""

    def main() -> tuple[float, ...]:
        trained(1)
        return drawn()

    def drawn() -> tuple[float, ...]:
        return torch.rand(()).item(), random.random(), np.random.randn()

    found = []
    for simulates in (False, True):
        torch.manual_seed(1), random.seed(1), np.random.seed(1)
        found.append(drawn())
        groups = len(distributed_c10d._world.pg_group_ranks)
        before = np.random.mtrand.get_bit_generator(), threading.active_count()
        if simulates:
            first, second = simulate(main, 2, seed=4, exchange="collective")
            assert [first, second] == simulate(main, 2, seed=4)
            assert first[0] == second[0]  # seeded by the script
            assert first[1:] != second[1:]  # as in processes that nobody has seeded
        assert len(distributed_c10d._world.pg_group_ranks) == groups
        assert (np.random.mtrand.get_bit_generator(), threading.active_count()) == before
        found.append(drawn())
    assert found[:2] == found[2:]


def test_settings_of_the_process_are_each_devices_own() -> None:
    def main() -> list[str]:
        before = torch.get_float32_matmul_precision()
        torch.set_float32_matmul_precision("high" if current_context().rank else "medium")
        words = "matrix products is medium on device 0 and high on device 1"
        with pytest.raises(DisagreementError, match=words):
            trainer_of_none()
        own = torch.get_float32_matmul_precision()
        torch.set_float32_matmul_precision(before)
        trained(1)
        return [own, torch.get_float32_matmul_precision()]

    found = simulate(main, 2, exchange="collective")
    assert found == [["medium", "highest"], ["high", "highest"]]


@for_each("exchange", EXCHANGES)
def test_a_trainer_that_fails_cuts_no_other_one(exchange: ExchangeName) -> None:
    def main() -> str:
        lead = current_context().rank == 0
        for _ in range(2):
            with pytest.raises(DisagreementError, match="deterministic is"):
                trainer_of_none(deterministic=lead)
        return trained()[0]

    assert set(simulate(main, 2, exchange=exchange)) == {reference()[0]}


def test_many_trainers_are_no_more_than_a_process_may_open() -> None:
    before = resource.getrlimit(resource.RLIMIT_NOFILE)
    few = (len(os.listdir("/proc/self/fd")) + 50, before[1])
    resource.setrlimit(resource.RLIMIT_NOFILE, few)

    def make_several() -> None:
        for _ in range(5):
            trainer_of_none()

    try:
        simulate(make_several, 4)
        assert resource.getrlimit(resource.RLIMIT_NOFILE) == few
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, before)


def test_the_same_seed_has_the_same_order() -> None:
    def order(seed: int) -> tuple[int, ...]:
        said: list[int] = []  # the devices' first words, as they come

        def main() -> None:
            trainer_of_none()
            said.append(current_context().rank)

        simulate(main, 4, seed=seed)
        return tuple(said)

    assert order(1) == order(1)
    assert len({order(seed) for seed in range(8)}) > 1


def trainer_of_none(**settings: Any) -> None:
    model = nn.Linear(2, 1)
    onefold.Trainer(model, torch.optim.SGD(model.parameters(), lr=0.1), loss, shards=4, **settings)


def test_faults_of_no_device_are_refused() -> None:
    with pytest.raises(ValueError, match="expected a device below 2 and a call from 1"):
        outcomes(trained, 2, faults=[Fault(device=2, call=1)])
