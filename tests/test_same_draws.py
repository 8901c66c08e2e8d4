"""Random numbers that all shards of a batch have in common: alike everywhere, new in each step."""

import random
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

import onefold
from onefold.core import randomness
from tests.small import make_trainer
from tests.tables import for_each

Drawn = tuple[float, float, float]


def drawn() -> Drawn:
    return float(torch.rand(())), random.random(), float(np.random.rand())


class Draws:
    """A loss that draws in blocks and between them, and keeps what it drew, by shard."""

    def __init__(self, *, gathers: bool = False, blocks: bool = True) -> None:
        self.same: list[tuple[Drawn, Drawn]] = []
        self.own: list[Any] = []
        self.gathers, self.blocks = gathers, blocks

    def __call__(self, model: nn.Module, batch: torch.Tensor) -> torch.Tensor:
        before, rows = drawn(), model(batch)
        if self.blocks:
            with onefold.same_rng_for_all_shards():
                first = drawn()
            with onefold.same_rng_for_all_shards("other"):
                other = drawn()
                with onefold.same_rng_for_all_shards():
                    assert drawn() == first
            self.same.append((first, other))
            rows = rows * first[0]
        self.own.append((*before, *drawn()))
        if self.gathers:
            rows = rows - onefold.gather(rows).mean()
        return rows.square().mean(dim=1)


def trainer_of(loss: Any, devices: int = 1, model: Any = None, **choices: Any) -> onefold.Trainer:
    torch.manual_seed(0)
    choices = {"shards": 3, "devices": devices, **choices}
    return make_trainer(model or nn.Linear(4, 3), loss, **choices)


def batch_of(step: int) -> torch.Tensor:
    return torch.randn(8, 4, generator=torch.Generator().manual_seed(step))


@for_each(("gathers", "choices"), [(True, {}), (False, {"microbatch": 2}), (False, {"shards": 1})])
def test_all_shards_draw_alike_and_each_step_anew(gathers: bool, choices: dict[str, Any]) -> None:
    prints = set()
    for devices in (1, 2, 3) if "shards" not in choices else (1,):
        trainer, steps = trainer_of(loss := Draws(gathers=gathers), devices, **choices), []
        for number in range(3):
            loss.same.clear()
            trainer.step(batch_of(number))
            assert len(set(loss.same)) == 1
            steps += [*loss.same[0]]
        assert len(set(steps)) == 6
        prints.add(trainer.fingerprint())
    assert len(prints) == 1


def test_what_is_drawn_around_a_block_is_as_if_it_were_not_there() -> None:
    """Each shard's own, and the script's."""
    losses = Draws(), Draws(blocks=False)
    for loss in losses:
        trainer = trainer_of(loss)
        torch.manual_seed(5), random.seed(5), np.random.seed(5)
        before = drawn()
        torch.manual_seed(5), random.seed(5), np.random.seed(5)
        trainer.step(batch_of(1))
        assert drawn() == before
        trainer.step(batch_of(2))
    assert losses[0].own == losses[1].own
    assert len({number for numbers in losses[0].own for number in numbers}) == 36


def test_evaluations_and_recomputed_statistics_draw_alike_in_each_batch() -> None:
    model = nn.Sequential(nn.Linear(4, 3), nn.BatchNorm1d(3))
    trainer = trainer_of(loss := Draws(), model=model, shards=2)
    trainer.average(decay=0.9)
    trainer.step(batch_of(1))
    loss.same.clear()
    trainer.evaluate(lambda m, x: {"x": loss(m, x)}, batch_of(1), batch_size=4)
    assert [loss.same.index(each) for each in loss.same] == [0, 0, 2, 2]
    with trainer.averaged(update_bn=batch_of(2), batch_size=8):
        assert model[1].num_batches_tracked


def test_outside_of_a_shard_there_is_nothing_to_be_the_same_in(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    # Whatever a test before this one has seeded by itself.
    monkeypatch.setattr(randomness.COMMON, "numbers", None)
    trainer_of(Draws()).step(batch_of(1))
    words = "no shard is computed or read: expected a call inside"
    with pytest.raises(RuntimeError, match=words), onefold.same_rng_for_all_shards():
        raise AssertionError("the block is not entered")


class Scaled:
    """Samples that scale all of a batch alike."""

    def __len__(self) -> int:
        return 10

    def __getitem__(self, index: int) -> torch.Tensor:
        with onefold.same_rng_for_all_shards("scale"):
            return torch.full((4,), index * random.random())


class Stream:
    def __iter__(self) -> Any:
        return iter(torch.arange(10.0)[:, None].expand(10, 4))


def collate(samples: list[torch.Tensor]) -> tuple[torch.Tensor, torch.Tensor]:
    with onefold.same_rng_for_all_shards():
        factor = torch.rand(())
    return torch.stack(samples) * factor, factor.expand(len(samples))


@for_each("workers", [0, 1])
@for_each("kind", [Scaled, Stream])
def test_a_collate_and_samples_draw_alike_in_each_batch(workers: int, kind: Any) -> None:
    found: list[float] = []

    def loss(model: nn.Module, batch: Any) -> torch.Tensor:
        found.extend({*batch[1].tolist()})
        return model(batch[0]).square().mean(dim=1)

    prints = set()
    for devices in (1, 3):
        trainer = trainer_of(loss, devices)
        found.clear()
        for batch in trainer.loader(kind(), batch_size=5, workers=workers, collate=collate):
            trainer.step(batch)
        assert [found.index(each) for each in found] == [0, 0, 0, 3, 3, 3]
        prints.add(trainer.fingerprint())
    assert len(prints) == 1
