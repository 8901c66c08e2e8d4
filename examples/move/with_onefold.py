"""A network learns whether two numbers have the same sign: with onefold, on any number of devices.

    onefold run --devices 2 examples/move/with_onefold.py

The other scripts in this folder train it with other libraries. docs/move explains the differences.
"""

import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import TensorDataset

import onefold


def loss(model, batch):
    x, y = batch
    return F.cross_entropy(model(x), y, reduction="none")


def main(epochs=5):
    torch.manual_seed(0)
    x = torch.randn(2048, 2)
    data = TensorDataset(x, (x[:, 0] * x[:, 1] > 0).long())
    model = nn.Sequential(nn.Linear(2, 32), nn.ReLU(), nn.Linear(32, 2))
    optimizer = torch.optim.Adam(model.parameters(), lr=0.01)

    trainer = onefold.Trainer(model, optimizer, loss, shards=8)
    loader = trainer.loader(data, batch_size=64, shuffle=True)
    for epoch in trainer.epochs(epochs):
        total = 0.0
        for batch in loader:
            total += float(trainer.step(batch).loss)
        if trainer.is_lead:
            print(f"epoch {epoch}: loss {total / len(loader):.3f}")
    print(trainer.fingerprint())


if __name__ == "__main__":
    main()
