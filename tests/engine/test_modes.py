"""Modes are the user's: a step computes in those that the modules have."""

from __future__ import annotations

import logging

import pytest
import torch
from torch import nn
from torch.utils.data import TensorDataset

from onefold.engine.modelparts import in_mode
from tests.small import Batch, bits, line, make_trainer, points, square
from tests.tables import for_each

both = for_each("devices", [1, 2])


def model() -> nn.Module:
    return nn.Sequential(nn.BatchNorm1d(3), nn.Dropout(0.5), line())


@both
def test_parts_in_evaluation_mode_stay_there(devices: int) -> None:
    module = model()
    module[0].eval()
    before = bits(module[0])
    trainer = make_trainer(module, devices=devices)
    for _ in range(2):
        trainer.step(points(8))
        trainer.evaluate(
            lambda m, b: {"loss": square(m, b)}, TensorDataset(*points(8)), batch_size=4
        )
    after = {n: v for n, v in bits(module[0]).items() if "running" in n or "tracked" in n}
    assert after == {name: before[name] for name in after}
    assert [part.training for part in module] == [False, True, True]
    assert module.training


def test_a_model_in_evaluation_mode_trains_as_in_a_plain_loop_and_says_so_once(
    caplog: pytest.LogCaptureFixture,
) -> None:
    ours, theirs = model().eval(), model().eval()
    trainer = make_trainer(ours, shards=1)
    optimizer = torch.optim.SGD(theirs.parameters(), lr=0.1, momentum=0.9)
    with caplog.at_level(logging.WARNING, "onefold"):
        for _ in range(3):
            trainer.step(points(8))
            optimizer.zero_grad()
            square(theirs, points(8)).mean().backward()
            optimizer.step()
    assert bits(ours) == bits(theirs)
    assert [r for r in caplog.messages if "evaluation mode" in r] == caplog.messages
    assert len(caplog.messages) == 1


@both
def test_a_loss_that_changes_modes_does_so_for_its_shard_alone(devices: int) -> None:
    def loss(module: nn.Module, batch: Batch) -> torch.Tensor:
        value = square(module, batch)
        module.eval()
        return value

    results = []
    for count in (1, devices):
        module = model()
        trainer = make_trainer(module, loss, devices=count)
        for _ in range(2):
            trainer.step(points(8))
        assert module.training
        results.append(bits(module))
    plain = model()
    trainer = make_trainer(plain, devices=devices)
    for _ in range(2):
        trainer.step(points(8))
    assert results == [bits(plain)] * 2


@both
def test_what_a_loss_freezes_is_frozen_for_its_shard_alone(devices: int) -> None:
    def loss(module: nn.Module, batch: Batch) -> torch.Tensor:
        value = square(module, batch)
        module[2].bias.requires_grad_(False)
        return value

    results = []
    for count in (1, devices):
        module = model()
        trainer = make_trainer(module, loss, devices=count)
        for _ in range(3):
            trainer.step(points(8))
        assert module[2].bias.requires_grad
        results.append(bits(module))
    assert results[0] == results[1]


class Merging(nn.Linear):
    """Adds its other weight to the first one in evaluation mode, as low-rank adapters do."""

    def __init__(self) -> None:
        super().__init__(3, 3)
        self.added = nn.Parameter(torch.ones(3, 3))
        self.calls: list[bool] = []
        self.merged = False

    def train(self, mode: bool = True) -> Merging:
        super().train(mode)
        self.calls.append(mode)
        if self.merged == mode:
            self.merged = not mode
        return self


def test_what_a_part_does_for_an_evaluation_it_undoes_afterwards() -> None:
    part, kept = Merging(), Merging()
    module = nn.Sequential(part, nn.Dropout(0.5), nn.Sequential(kept, nn.Dropout(0.5)))
    kept.eval()
    module[1].eval()
    before = [each.training for each in module.modules()]
    part.calls, kept.calls = [], []
    with in_mode(module, training=False):
        assert part.merged
        assert not any(each.training for each in module.modules())
    assert not part.merged
    assert kept.merged
    assert (part.calls, kept.calls) == ([False, True], [False])
    assert [each.training for each in module.modules()] == before
