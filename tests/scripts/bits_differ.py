"""A script for ``onefold verify``: trainers whose bits depend on the devices, after one that is
right, and one that makes no step."""

from typing import Any

import numpy as np
import torch
from torch import nn

import onefold


class Line(nn.Linear):
    def __init__(self) -> None:
        super().__init__(8, 1)


class Counting(Line):
    """Its output depends on how often it was called."""

    calls = 0

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.calls += 1
        return super().forward(x) * (1 + 0.01 * self.calls)


class OwnGenerator(Line):
    """Draws from a generator of its own, which onefold seeds for each shard."""

    def __init__(self) -> None:
        super().__init__()
        self.generator = torch.Generator().manual_seed(0)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return super().forward(x) + torch.rand(1, generator=self.generator)


class DrawnBetween(Line):
    """Is given a number that is drawn between steps."""

    noise = 0.0

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return super().forward(x) + self.noise


class Unseeded(Line):
    """Makes a generator of its own for every call."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return super().forward(x) + float(np.random.default_rng().normal())


def started_anywhere() -> nn.Module:
    """Its first values are nobody's choice."""
    model, generator = Line(), torch.Generator()
    generator.seed()
    nn.init.uniform_(model.weight, generator=generator)
    return model


def loss(model: nn.Module, batch: Any) -> torch.Tensor:
    losses: torch.Tensor = (model(batch[0]) - batch[1]).square().mean(dim=1)
    return losses


def main() -> None:
    torch.manual_seed(0)
    drawn = DrawnBetween()
    models = [Line(), Counting(), OwnGenerator(), drawn, Unseeded(), started_anywhere(), Line()]
    trainers = [
        onefold.Trainer(model, torch.optim.SGD(model.parameters(), lr=0.01), loss, shards=4)
        for model in models
    ]
    generator = torch.Generator().manual_seed(1)
    for _ in range(100):
        batch = torch.randn(12, 8, generator=generator), torch.randn(12, 1, generator=generator)
        if trainers[0].is_lead:
            torch.rand(3)  # a picture for the log, say
        drawn.noise = float(torch.rand(()))
        for trainer in trainers[:-1]:
            trainer.step(batch)


if __name__ == "__main__":
    main()
