"""Gradient penalties inside the loss: those of a plain loop, on any number of devices."""

from __future__ import annotations

import copy
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

from tests.small import Batch, make_trainer
from tests.tables import for_each


class Critic(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Sequential(nn.Linear(5, 16), nn.Softplus(), nn.Linear(16, 1))

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        return self.body(inputs)[:, 0]


def with_penalty(model: nn.Module, batch: Batch) -> torch.Tensor:
    """WGAN-GP: the norm of the critic's gradient between real and made samples."""
    real, fake = batch
    between = (0.3 * real + 0.7 * fake).requires_grad_(True)
    (slope,) = torch.autograd.grad(model(between).sum(), between, create_graph=True)
    return model(fake) - model(real) + 10 * (slope.norm(dim=1) - 1).square()


def r1(model: nn.Module, batch: Batch) -> torch.Tensor:
    real = batch[0].clone().requires_grad_(True)
    (slope,) = torch.autograd.grad(model(real).sum(), real, create_graph=True)
    return F.softplus(-model(real)) + 0.5 * slope.square().sum(dim=1)


@for_each("function", [with_penalty, r1])
@for_each("options", [{}, {"microbatch": 2}])
@for_each("devices", [1, 3])
def test_gradient_penalties_work_in_a_step(
    function: Any, options: dict[str, Any], devices: int
) -> None:
    torch.manual_seed(2)
    batch = torch.randn(14, 5, dtype=torch.float64), torch.randn(14, 5, dtype=torch.float64)
    model = Critic().double()
    expected = copy.deepcopy(model)
    trainer = make_trainer(model, function, devices=devices, **options)
    optimizer = torch.optim.SGD(expected.parameters(), lr=0.1, momentum=0.9)
    for _ in range(3):
        trainer.step(batch)
        optimizer.zero_grad()
        function(expected, batch).mean().backward()
        optimizer.step()
    for mine, other in zip(model.parameters(), expected.parameters(), strict=True):
        torch.testing.assert_close(mine, other, rtol=1e-10, atol=1e-12)


@for_each("function", [with_penalty, r1])
def test_the_bits_of_a_penalty_do_not_depend_on_the_devices(function: Any) -> None:
    torch.manual_seed(2)
    batch, start = (torch.randn(11, 5), torch.randn(11, 5)), Critic()
    for options in ({}, {"microbatch": 2}):
        found = set()
        for devices in (1, 2, 3):
            trainer = make_trainer(copy.deepcopy(start), function, devices=devices, **options)
            for _ in range(3):
                trainer.step(batch)
            found.add(trainer.fingerprint())
        assert len(found) == 1
