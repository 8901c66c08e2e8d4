"""A script for ``onefold verify``: trainers whose bits depend on the devices, after one that is
right, and one that makes no step."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from torch import nn

import onefold


class Counting(nn.Module):
    """Its output depends on how often it was called."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(8, 1)
        self.calls = 0

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.calls += 1
        return self.inner(x) * (1 + 0.01 * self.calls)


class OwnGenerator(nn.Module):
    """Draws from a generator that nobody seeds for a shard."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(8, 1)
        self.generator = torch.Generator().manual_seed(0)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.inner(x) + torch.rand(1, generator=self.generator)


class Unseeded(nn.Module):
    """Makes a generator of its own for every call."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(8, 1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.inner(x) + float(np.random.default_rng().normal())


def started_anywhere() -> nn.Module:
    """Its first values are nobody's choice."""
    model, generator = nn.Linear(8, 1), torch.Generator()
    generator.seed()
    nn.init.uniform_(model.weight, generator=generator)
    return model


class DrawnBetween(nn.Module):
    """Is given a number that is drawn between steps."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(8, 1)
        self.noise = 0.0

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.inner(x) + self.noise


def loss(model: nn.Module, batch: Any) -> torch.Tensor:
    return (model(batch[0]) - batch[1]).square().mean(dim=1)


def main() -> None:
    torch.manual_seed(0)
    drawn = DrawnBetween()
    changing = [Counting(), OwnGenerator(), drawn, Unseeded(), started_anywhere()]
    models = [nn.Linear(8, 1), *changing, nn.Linear(8, 1)]
    trainers = [
        onefold.Trainer(model, torch.optim.SGD(model.parameters(), lr=0.01), loss, shards=4)
        for model in models
    ]
    generator = torch.Generator().manual_seed(1)
    for _ in range(100):
        batch = (
            torch.randn(12, 8, generator=generator),
            torch.randn(12, 1, generator=generator),
        )
        if trainers[0].is_lead:
            torch.rand(3)  # a picture for the log, say
        drawn.noise = float(torch.rand(()))
        for trainer in trainers[:-1]:
            trainer.step(batch)


if __name__ == "__main__":
    main()
