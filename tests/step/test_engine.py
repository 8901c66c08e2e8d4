"""One step through replicas, exchange and update: its verdict, what it reports, how it fails."""

import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn
from torch.utils.data import TensorDataset

import onefold
from onefold.errors import GradientError, LossError, StateError
from onefold.shard.advice import advice_on
from tests.inside import engine_in
from tests.small import Batch, bits, line, make_trainer, points, sgd, square
from tests.tables import for_each

both = for_each("devices", [1, 3])


class Weighed:
    """A loss whose samples count for nothing while it is off."""

    def __init__(self, *, on: bool = True) -> None:
        self.on = on

    def __call__(self, model: nn.Module, batch: Batch) -> onefold.Mean:
        values = square(model, batch) * float(self.on)
        return onefold.Mean(values.sum(), float(self.on) * len(values))


def test_a_step_without_weight_is_skipped_by_all() -> None:
    """Neither parameters, nor the optimizer's state, nor scheduler or average move; it counts."""
    found = []
    for devices in (1, 2, 4):
        loss, model = Weighed(), nn.Sequential(nn.BatchNorm1d(3), line())
        optimizer = sgd(model)
        scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 1, gamma=0.5)
        trainer = make_trainer(
            model, loss, optimizer=optimizer, devices=devices, scheduler=scheduler
        )
        trainer.average(decay=0.5)
        prints = []
        for number, on in enumerate((True, False, True, False), start=1):
            loss.on = on
            rate = optimizer.param_groups[0]["lr"]
            before = {name: value.detach().clone() for name, value in model.named_parameters()}
            with trainer.averaged():
                average = {name: bits(model)[name] for name in before}
            step = trainer.step(points(10))
            assert (step.number, bool(step.skipped)) == (number, not on)
            assert optimizer.param_groups[0]["lr"] == (rate / 2 if on else rate)
            moved = any(not torch.equal(p, before[n]) for n, p in model.named_parameters())
            with trainer.averaged():
                followed = any(bits(model)[name] != value for name, value in average.items())
            assert (moved, followed) == (on, on)
            assert step.loss.isnan() == np.isnan(step.grad_norm) == (not on)
            prints.append(trainer.fingerprint())
        found.append(prints)
        assert trainer.steps == 4
    assert found[0] == found[1] == found[2]


@both
def test_every_seed_step_and_shard_has_its_own_random_numbers(devices: int) -> None:
    drawn: set[tuple[float, ...]] = set()

    def loss(model: nn.Module, batch: Batch) -> torch.Tensor:
        drawn.add((torch.rand(()).item(), random.random(), float(np.random.rand())))
        return square(model, batch)

    def train(seed: int, devices: int) -> set[tuple[float, ...]]:
        drawn.clear()
        trainer = make_trainer(loss=loss, devices=devices, seed=seed)
        for _ in range(3):
            trainer.step(points(8))
        return set(drawn)

    alone, another = train(0, 1), train(1, 1)
    assert len(alone | another) == 2 * 3 * 4
    for each in zip(*(alone | another), strict=True):
        assert len(set(each)) == 2 * 3 * 4
    assert train(0, devices) == alone


@for_each("precision", ["fp16", "fp16-params"])
def test_the_scale_of_losses_is_taken_off_their_gradients(precision: str) -> None:
    model, plain = line(), line()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    trainer = make_trainer(model, optimizer=optimizer, precision=precision)
    while trainer.step(points(8)).skipped:
        assert trainer.steps < 20
    square(plain, points(8)).mean().backward()
    for ours, theirs in zip(model.parameters(), plain.parameters(), strict=True):
        assert theirs.grad is not None
        torch.testing.assert_close(ours.float(), theirs - 0.1 * theirs.grad, rtol=0, atol=0.01)


class Breaking(torch.optim.SGD):
    fails = True

    def step(self, closure: Any = None) -> Any:
        if self.fails:
            raise ArithmeticError("in the update")
        super().step()


def test_a_model_whose_update_broke_off_is_not_saved_until_it_is_loaded(tmp_path: Path) -> None:
    model = line()
    optimizer = Breaking(model.parameters(), lr=0.1)
    trainer = make_trainer(model, optimizer=optimizer)
    trainer.save(tmp_path)
    with pytest.raises(ArithmeticError, match="in the update"):
        trainer.step(points(8))
    optimizer.fails = False
    for call in (lambda: trainer.step(points(8)), lambda: trainer.save(tmp_path)):
        with pytest.raises(StateError, match="was called after step 1 was interrupted, so"):
            call()
    trainer.load(tmp_path)
    trainer.step(points(8))
    trainer.save(tmp_path)


@for_each(
    ("error", "words"),
    [
        (RuntimeError("set CUBLAS_WORKSPACE_CONFIG=:4096:8"), "Create Trainer before any"),
        (
            RuntimeError("torch.func.{grad} don't yet support saved tensor hooks"),
            "--placement replicate",
        ),
        (RuntimeError("x does not have a deterministic implementation"), "deterministic=False"),
        (RuntimeError("out of order"), ""),
    ],
)
def test_what_can_be_done_about_an_error_is_said(error: Exception, words: str) -> None:
    advice = advice_on(error, samples=3, shards=4)
    assert words in advice
    assert bool(advice) is bool(words)


@for_each("devices", [1, 2])
def test_a_lack_of_memory_names_step_and_shard_and_says_what_to_do(devices: int) -> None:
    fails = [False]

    def loss(model: nn.Module, batch: Batch) -> torch.Tensor:
        if fails[0] and bool((batch[0] == last).all(dim=1).any()):
            raise torch.OutOfMemoryError("tried to allocate")
        return square(model, batch)

    trainer = make_trainer(loss=loss, devices=devices)
    batch = points(8)
    last = batch[0][-1]
    trainer.step(batch)
    before = trainer.fingerprint()
    fails[0] = True
    with pytest.raises(torch.OutOfMemoryError) as raised:
        trainer.step(batch)
    where, advice = raised.value.__notes__
    assert where == f"raised in step 2, shard 3, on device {devices - 1} (cpu)"
    assert advice.startswith(
        "a shard of 2 samples does not fit into memory. Run it in microbatches"
    )
    assert "more than 4 shards" in advice
    assert trainer.fingerprint() == before
    fails[0] = False
    assert trainer.step(batch).number == 2


Change = Callable[[torch.Tensor], torch.Tensor]


def to_nan(losses: torch.Tensor) -> torch.Tensor:
    return losses * torch.nan


def infinite_slope(losses: torch.Tensor) -> torch.Tensor:
    """Zero, with a gradient that is not finite."""
    return (losses - losses.detach()).sqrt()


class Spoils:
    def __init__(self, change: Change = to_nan) -> None:
        self.change = change
        self.on = False
        self.calls = 0

    def __call__(self, model: nn.Module, batch: Batch) -> torch.Tensor:
        self.calls += 1
        losses = square(model, batch)
        return self.change(losses) if self.on else losses


def late(loss: Spoils, devices: int = 1) -> onefold.Trainer:
    """A trainer that looks as one on a GPU does."""
    trainer = make_trainer(loss=loss, devices=devices)
    engine_in(trainer)._finite._is_late = True
    return trainer


@for_each("devices", [1, 2])
@for_each(
    ("change", "kind", "words"),
    [
        (to_nan, LossError, "loss of step 2, shard 0 is nan"),
        (infinite_slope, GradientError, "gradient of step 2 is not finite, and its update was"),
    ],
)
def test_the_error_comes_one_step_late(change: Change, kind: Any, words: str, devices: int) -> None:
    loss = Spoils(change)
    trainer, plain = late(loss, devices), make_trainer(devices=devices)
    for each in (trainer, plain):
        each.step(points(8))
    assert trainer.fingerprint() == plain.fingerprint()
    loss.on = True
    assert not trainer.step(points(8)).skipped
    after, loss.on, calls = trainer.fingerprint(), False, loss.calls
    with pytest.raises(kind, match=words):
        trainer.step(points(8))
    assert trainer.fingerprint() == after
    # A GPU has work by then: it is asked only once all shards of this step are under way.
    assert loss.calls == calls + 4


@for_each("value", [torch.inf, -torch.inf, torch.nan])
@for_each("devices", [1, 2])
def test_a_gradient_that_is_not_finite_is_not_used(value: float, devices: int) -> None:
    trainer = make_trainer(devices=devices)
    trainer.step(points(8))
    before = trainer.fingerprint()
    weight = trainer.model.get_parameter("weight")
    hook = weight.register_hook(lambda gradient: torch.full_like(gradient, value))
    with pytest.raises(GradientError, match=r"step 2, shard 0 .*: the gradient of weight is not"):
        trainer.step(points(8))
    hook.remove()
    assert trainer.fingerprint() == before


def test_whoever_uses_the_model_hears_of_it_first(tmp_path: Path) -> None:
    score, data = lambda m, b: {"x": square(m, b)}, TensorDataset(*points(8))
    for use in (
        lambda trainer: trainer.save(tmp_path),
        lambda trainer: trainer.evaluate(score, data, batch_size=4),
    ):
        loss = Spoils()
        trainer = late(loss)
        loss.on = True
        trainer.step(points(8))
        with pytest.raises(LossError, match="loss of step 1"):
            use(trainer)
