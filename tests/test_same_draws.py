"""Random numbers that all shards of a batch have in common: alike everywhere, new in each step."""

from __future__ import annotations

import random
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

import onefold
from onefold.core import randomness
from tests.tables import for_each

Drawn = tuple[float, float, float]


def drawn() -> Drawn:
    return float(torch.rand(())), random.random(), float(np.random.rand())


class Draws:
    """A loss that draws in blocks and between them, and keeps what it drew, by shard."""

    def __init__(self, *, gathers: bool = False) -> None:
        self.same: list[Drawn] = []
        self.other: list[Drawn] = []
        self.own: list[Drawn] = []
        self._gathers = gathers

    def __call__(self, model: nn.Module, batch: torch.Tensor) -> torch.Tensor:
        before = drawn()
        with onefold.same_in_all_shards():
            first = drawn()
        with onefold.same_in_all_shards("other"):
            self.other.append(drawn())
            with onefold.same_in_all_shards():
                assert drawn() == first
        with onefold.same_in_all_shards():
            self.same.append(drawn())
        assert self.same[-1] == first
        self.own.append((*before, *drawn()))  # type: ignore[arg-type]
        rows = model(batch) * first[0]
        if self._gathers:
            rows = rows - onefold.gather(rows).mean()
        return rows.square().mean(dim=1)


def trainer_of(loss: Any, devices: int = 1, shards: int = 3, **choices: Any) -> onefold.Trainer:
    torch.manual_seed(0)
    model = nn.Linear(4, 2)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    named = ["cpu"] * devices
    return onefold.Trainer(model, optimizer, loss, shards=shards, devices=named, **choices)


def batch_of(step: int) -> torch.Tensor:
    return torch.randn(8, 4, generator=torch.Generator().manual_seed(step))


@for_each("choices", [{}, {"microbatch": 2}, {"shards": 1}])
@for_each("gathers", [False, True])
def test_all_shards_draw_alike_and_each_step_anew(choices: dict[str, Any], gathers: bool) -> None:
    if gathers and "microbatch" in choices:
        pytest.skip("pieces of a shard cannot gather")
    loss = Draws(gathers=gathers)
    trainer = trainer_of(loss, **choices)
    steps = []
    for number in range(3):
        loss.same.clear()
        loss.other.clear()
        trainer.step(batch_of(number))
        assert len(set(loss.same)) == len(set(loss.other)) == 1
        steps += [loss.same[0], loss.other[0]]
    assert len(set(steps)) == 6


def test_what_is_drawn_around_a_block_is_as_if_it_were_not_there() -> None:
    def plain(model: nn.Module, batch: torch.Tensor) -> torch.Tensor:
        own.append((*drawn(), *drawn()))
        return model(batch).square().mean(dim=1)

    own: list[Any] = []
    loss = Draws()
    trainer_of(loss).step(batch_of(1))
    trainer_of(plain).step(batch_of(1))
    assert loss.own == own
    assert len(set(own)) == 3  # and those are each shard's own


@for_each("gathers", [False, True])
def test_the_bits_do_not_depend_on_the_devices(gathers: bool) -> None:
    found = set()
    for devices in (1, 2, 3):
        trainer = trainer_of(Draws(gathers=gathers), devices)
        for number in range(3):
            trainer.step(batch_of(number))
        found.add(trainer.fingerprint())
    assert len(found) == 1


def test_an_evaluation_draws_alike_in_each_batch() -> None:
    found: list[Drawn] = []

    def score(model: nn.Module, batch: torch.Tensor) -> dict[str, torch.Tensor]:
        with onefold.same_in_all_shards():
            found.append(drawn())
        return {"x": batch.mean(dim=1)}

    trainer_of(Draws()).evaluate(score, batch_of(1), batch_size=4)
    assert len(found) == 6
    assert len(set(found[:3])) == len(set(found[3:])) == 1
    assert found[0] != found[3]


def test_the_scripts_own_generators_are_left_alone() -> None:
    trainer = trainer_of(Draws())
    states = torch.get_rng_state(), random.getstate(), np.random.get_state(legacy=False)
    trainer.step(batch_of(1))
    after = torch.get_rng_state(), random.getstate(), np.random.get_state(legacy=False)
    assert torch.equal(states[0], after[0])
    assert states[1] == after[1]
    assert (states[2]["state"]["key"] == after[2]["state"]["key"]).all()  # type: ignore[index]


def test_outside_of_a_shard_there_is_nothing_to_be_the_same_in(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    # Whatever a test before this one has seeded by itself.
    monkeypatch.setattr(randomness.COMMON, "numbers", None)
    trainer = trainer_of(Draws())
    trainer.step(batch_of(1))
    with (
        pytest.raises(RuntimeError, match="no shard is computed or read: expected a call inside"),
        onefold.same_in_all_shards(),
    ):
        raise AssertionError("the block is not entered")


class Scaled:
    """Samples and a collate that scale all of a batch alike."""

    def __len__(self) -> int:
        return 10

    def __getitem__(self, index: int) -> torch.Tensor:
        with onefold.same_in_all_shards("scale"):
            return torch.full((4,), index * random.random())


def collate(samples: list[torch.Tensor]) -> tuple[torch.Tensor, torch.Tensor]:
    with onefold.same_in_all_shards():
        factor = torch.rand(())
    return torch.stack(samples) * factor, factor.expand(len(samples))


def stream() -> Any:
    yield from (torch.full((4,), float(index)) for index in range(10))


class Stream(torch.utils.data.IterableDataset[torch.Tensor]):
    def __iter__(self) -> Any:
        return stream()


@for_each("workers", [0, 1])
@for_each("kind", [Scaled, Stream])
def test_a_collate_and_samples_draw_alike_in_each_batch(workers: int, kind: Any) -> None:
    found: list[torch.Tensor] = []

    def loss(model: nn.Module, batch: Any) -> torch.Tensor:
        rows, factors = batch
        found.append(factors)
        return model(rows).square().mean(dim=1)

    prints = set()
    for devices in (1, 2, 3):
        trainer = trainer_of(loss, devices)
        found.clear()
        for batch in trainer.loader(kind(), batch_size=5, workers=workers, collate=collate):
            trainer.step(batch)
        factors = [set(factors.tolist()) for factors in found]
        assert factors[:3] == [factors[0]] * 3
        assert factors[3:] == [factors[3]] * 3
        assert factors[0] != factors[3]
        prints.add(trainer.fingerprint())
    assert len(prints) == 1


def test_statistics_of_averages_are_recomputed_with_such_a_loss() -> None:
    model = nn.Sequential(nn.Linear(4, 3), nn.BatchNorm1d(3))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    trainer = onefold.Trainer(model, optimizer, Draws(), shards=2, devices=["cpu"])
    trainer.average(decay=0.9)
    trainer.step(batch_of(1))
    with trainer.averaged(update_bn=batch_of(2), batch_size=8):
        assert trainer.model[1].num_batches_tracked > 0  # type: ignore[index]
