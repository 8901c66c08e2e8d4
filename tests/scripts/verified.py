"""A script for ``onefold verify``: sound, or with one of the faults that it is there to find."""

from __future__ import annotations

import os
import sys

import numpy as np
import torch
from torch import nn

import onefold

FAULT = sys.argv[1]


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(8, 16)
        self.second = nn.Linear(16, 3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        hidden = self.first(x).tanh()
        if FAULT == "unseeded":
            hidden = hidden + torch.from_numpy(np.random.default_rng().normal(size=16)).float()
        if FAULT == "rank":
            hidden = hidden * (1 + 1e-3 * int(os.environ["RANK"]))
        return self.second(nn.functional.dropout(hidden, 0.1, self.training))


def loss(model: nn.Module, batch: tuple[torch.Tensor, torch.Tensor]) -> torch.Tensor:
    return nn.functional.cross_entropy(model(batch[0]), batch[1], reduction="none")


def main() -> None:
    if FAULT != "start":
        torch.manual_seed(0)
    model = Model()
    trainer = onefold.Trainer(model, torch.optim.Adam(model.parameters()), loss, shards=4)
    generator = torch.Generator().manual_seed(1)
    inputs = torch.randn(64, 8, generator=generator)
    labels = torch.randint(0, 3, (64,), generator=generator)
    data = torch.utils.data.TensorDataset(inputs, labels)
    if FAULT == "raise":
        raise RuntimeError("no run at all")
    for _ in trainer.epochs(1000):
        for batch in trainer.loader(data, batch_size=10, shuffle=True):
            trainer.step(batch)
    raise AssertionError("verify ends the script after the steps that it was asked for")


if __name__ == "__main__":
    main()
