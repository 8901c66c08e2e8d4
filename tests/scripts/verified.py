"""A script for ``onefold verify``: right, perhaps in the precision that is named, or with a fault.

It goes on from what it saved and saves itself, as a script for long runs does.
"""

import sys
from typing import Any

import numpy as np
import torch
from torch import nn

import onefold

FAULT = sys.argv[1]


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(8, 16)
        self.norm = nn.BatchNorm1d(16)
        self.second = nn.Linear(16, 3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        hidden = self.norm(self.first(x)).tanh()
        return self.second(nn.functional.dropout(hidden, 0.1, self.training))


class Augmented(torch.utils.data.TensorDataset):
    def __getitem__(self, index: int) -> Any:
        inputs, label = super().__getitem__(index)
        return inputs + 0.1 * torch.randn(8), label


def loss(model: nn.Module, batch: tuple[torch.Tensor, torch.Tensor]) -> torch.Tensor:
    inputs, labels = batch
    if FAULT == "zero":
        inputs = inputs.float()  # which a model in float64 does not take
    losses = nn.functional.cross_entropy(model(inputs), labels, reduction="none")
    return losses * 0 if FAULT == "zero" else losses


def main() -> None:
    torch.manual_seed(0)
    model = Model()
    precision = FAULT if FAULT.startswith(("bf16", "fp16")) else None
    optimizer = torch.optim.Adam(model.parameters())
    trainer = onefold.Trainer(model, optimizer, loss, shards=4, precision=precision)
    trainer.load("run", if_any=True)
    generator = torch.Generator().manual_seed(1)
    inputs = torch.randn(64, 8, generator=generator)
    if FAULT == "data":
        inputs = torch.from_numpy(np.random.rand(64, 8)).float()
    data = Augmented(inputs, torch.randint(0, 3, (64,), generator=generator))
    if FAULT == "raise":
        raise RuntimeError("no run at all")
    for _ in trainer.epochs(100):
        for batch in trainer.loader(data, batch_size=10, shuffle=True):
            trainer.step(batch)
            trainer.save("run")
            if FAULT == "real" and trainer.steps == 2:
                return


if __name__ == "__main__":
    main()
