"""Trains for some epochs, and averages from the second on: ``averaging.py EPOCHS``."""

from __future__ import annotations

import sys

import torch
from torch import nn

import onefold


def loss(model: nn.Module, batch: tuple[torch.Tensor]) -> torch.Tensor:
    losses: torch.Tensor = model(batch[0]).square().mean(dim=1)
    return losses


def main() -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, 60), nn.BatchNorm1d(60), nn.Linear(60, 3))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
    trainer = onefold.Trainer(model, optimizer, loss, shards=3, seed=1)
    data = torch.utils.data.TensorDataset(torch.randn(30, 8))
    batches = trainer.loader(data, batch_size=10, shuffle=True)
    for epoch in trainer.epochs(int(sys.argv[1])):
        if epoch == 1:
            trainer.average(mean=True, every=2)
        for batch in batches:
            trainer.step(batch)
        if epoch:
            with trainer.averaged(update_bn=data, batch_size=10):
                print(trainer.steps, trainer.fingerprint(), flush=True)


main()
