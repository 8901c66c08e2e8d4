"""When a loss that is not finite is noticed, where looking at it would wait for a device."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.data import TensorDataset

import onefold
from onefold.errors import GradientError, LossError
from tests.inside import engine_in
from tests.small import Batch, make_trainer, points, square
from tests.tables import for_each

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
        (infinite_slope, GradientError, "gradient of step 2 is not finite, and has been used"),
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
    hook = trainer.model.weight.register_hook(lambda gradient: torch.full_like(gradient, value))
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
