"""A script for ``onefold verify``: a trainer for each way of being wrong, and two that are right.

The bits agree on any number of devices; what differs is the number that was meant.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

import onefold


class Augmented(torch.utils.data.Dataset[Any]):
    """Random numbers for every sample."""

    def __len__(self) -> int:
        return 40

    def __getitem__(self, index: int) -> Any:
        return torch.full((8,), index / 40.0) + torch.randn(8), index % 3


class OneSeries(nn.Module):
    """Takes time first."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.LSTM(8, 4)
        self.out = nn.Linear(4, 3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.out(self.layer(x)[0])


def classifier() -> nn.Module:
    return nn.Sequential(nn.Linear(8, 6), nn.BatchNorm1d(6), nn.Dropout(0.2), nn.Linear(6, 3))


def right(model: nn.Module, batch: Any) -> object:
    return F.cross_entropy(model(batch[0]), batch[1], reduction="none")


def right_with_weights(model: nn.Module, batch: Any) -> object:
    weight = torch.tensor([1.0, 3.0, 0.2])
    return onefold.losses.cross_entropy(model(batch[0]), batch[1], weight=weight, ignore_index=2)


def summed(model: nn.Module, batch: Any) -> object:
    return F.cross_entropy(model(batch[0]), batch[1], reduction="sum")


def weighted(model: nn.Module, batch: Any) -> object:
    weight = torch.tensor([1.0, 3.0, 0.2])
    return F.cross_entropy(model(batch[0]), batch[1], weight=weight)


def ignoring(model: nn.Module, batch: Any) -> object:
    return F.cross_entropy(model(batch[0]), batch[1], ignore_index=2)


def contrastive(model: nn.Module, batch: Any) -> object:
    once = model(batch[0])
    return F.cross_entropy(once @ once.T, torch.arange(len(once)))


def along_time(model: nn.Module, batch: Any) -> object:
    x, y = batch
    return F.cross_entropy(model(x).flatten(0, 1), y.flatten())


LOSSES = (right, right_with_weights, summed, weighted, ignoring, contrastive)


def main() -> None:
    torch.manual_seed(0)
    trainers = []
    for loss in LOSSES:
        model = classifier()
        optimizer = torch.optim.Adam(model.parameters())
        trainer = onefold.Trainer(model, optimizer, loss, shards=3)
        trainers.append((trainer, trainer.loader(Augmented(), batch_size=13, shuffle=True)))
    series = OneSeries()
    optimizer = torch.optim.Adam(series.parameters())
    timed = onefold.Trainer(series, optimizer, along_time, shards=3)
    generator = torch.Generator().manual_seed(1)
    for _ in range(1000):
        for batches in zip(*(loader for _, loader in trainers), strict=True):
            for (trainer, _), batch in zip(trainers, batches, strict=True):
                trainer.step(batch)
            x = torch.randn(9, 4, 8, generator=generator)  # time, samples, values
            timed.step((x, torch.randint(0, 3, (9, 4), generator=generator)))
    raise AssertionError("verify ends the script after the steps that it was asked for")


if __name__ == "__main__":
    main()
