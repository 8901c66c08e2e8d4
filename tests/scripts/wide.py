"""Trains a model of 92 MiB for two steps, with PyTorch alone or with onefold."""

import sys

import torch
from torch import nn

import onefold


class Wide(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(1700, 1700) for _ in range(8))

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            inputs = inputs + layer(inputs).tanh()
        return inputs


def loss(model: nn.Module, batch: torch.Tensor) -> torch.Tensor:
    return model(batch).square().mean(dim=1)


torch.manual_seed(1)
batch = torch.randn(8, 1700)
model = onefold.build(Wide)
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
if sys.argv[1] == "pytorch":
    for _ in range(2):
        optimizer.zero_grad()
        loss(model, batch).mean().backward()
        optimizer.step()
else:
    trainer = onefold.Trainer(model, optimizer, loss, shards=4, threads=1)
    for _ in range(2):
        trainer.step(batch)
    print(trainer.fingerprint())
