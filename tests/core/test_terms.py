"""Losses of several terms, each with a divisor of its own, and losses that are not divided."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import nn

import onefold
from onefold.errors import LossError
from tests.small import Batch, line, make_trainer, points, square
from tests.tables import for_each

SAMPLES = 11
Loss = Callable[[nn.Module, Batch], object]


def counted(batch: Batch) -> torch.Tensor:
    return (batch[1][:, 0] > 0).to(batch[0].dtype)


def two_means(model: nn.Module, batch: Batch) -> onefold.Means:
    """Over those with a positive target, and over all."""
    chosen = counted(batch)
    losses = square(model, batch)
    return onefold.Mean((losses * chosen).sum(), chosen.sum()) + 0.5 * onefold.Mean(
        model(batch[0]).abs().sum(), len(batch[0])
    )


def two_means_plain(model: nn.Module, batch: Batch) -> torch.Tensor:
    chosen = counted(batch)
    first = (square(model, batch) * chosen).sum() / chosen.sum()
    return first + 0.5 * model(batch[0]).abs().mean()


def mean_and_sum(model: nn.Module, batch: Batch) -> onefold.Means:
    chosen = counted(batch)
    return onefold.Mean((square(model, batch) * chosen).sum(), chosen.sum()) + onefold.Sum(
        model(batch[0]).square().sum() * 0.01
    )


def mean_and_sum_plain(model: nn.Module, batch: Batch) -> torch.Tensor:
    chosen = counted(batch)
    first = (square(model, batch) * chosen).sum() / chosen.sum()
    return first + model(batch[0]).square().sum() * 0.01


LOSSES: dict[str, tuple[Loss, Callable[[nn.Module, Batch], torch.Tensor]]] = {
    "two means": (two_means, two_means_plain),
    "mean and sum": (mean_and_sum, mean_and_sum_plain),
}


def batch() -> Batch:
    inputs, targets = points(SAMPLES)
    return inputs.double(), targets.double()


@for_each("shards", [1, 5, 16])
@for_each("name", LOSSES)
def test_loss_and_gradient_are_those_of_the_whole_batch(name: str, shards: int) -> None:
    ours, theirs = line().double(), line().double()
    loss, plain = LOSSES[name]
    optimizers = [torch.optim.SGD(m.parameters(), lr=0.01) for m in (ours, theirs)]
    trainer = make_trainer(ours, loss, optimizer=optimizers[0], shards=shards)
    for _ in range(3):
        step = trainer.step(batch())
        optimizers[1].zero_grad()
        value = plain(theirs, batch())
        value.backward()
        optimizers[1].step()
        assert float(step.loss) == pytest.approx(value.item(), rel=1e-12)
    for mine, other in zip(ours.parameters(), theirs.parameters(), strict=True):
        torch.testing.assert_close(mine, other, rtol=1e-12, atol=1e-14)


def test_shards_whose_losses_are_of_other_kinds_are_refused() -> None:
    def loss(model: nn.Module, batch: Batch) -> object:
        mean = onefold.Mean(square(model, batch).sum(), len(batch[0]))
        return mean + mean if batch[0][0, 0] == points(8)[0][0, 0] else mean

    with pytest.raises(LossError, match="step 1 is of several kinds: a mean, a sum of 2 terms"):
        make_trainer(line(), loss, shards=2).step(points(8))
