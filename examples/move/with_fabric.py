"""The task of with_onefold.py, with Lightning Fabric.

python examples/move/with_fabric.py
"""

import torch
import torch.nn.functional as F
from lightning_fabric import Fabric
from torch import nn
from torch.utils.data import DataLoader, TensorDataset


def main(epochs=5, devices="auto"):
    fabric = Fabric(devices=devices)
    fabric.launch()
    fabric.seed_everything(0)
    x = torch.randn(2048, 2)
    data = TensorDataset(x, (x[:, 0] * x[:, 1] > 0).long())
    model = nn.Sequential(nn.Linear(2, 32), nn.ReLU(), nn.Linear(32, 2))
    optimizer = torch.optim.Adam(model.parameters(), lr=0.01)

    model, optimizer = fabric.setup(model, optimizer)
    loader = DataLoader(data, batch_size=64 // fabric.world_size, shuffle=True)
    loader = fabric.setup_dataloaders(loader)
    for epoch in range(epochs):
        total = 0.0
        for x, y in loader:
            loss = F.cross_entropy(model(x), y)
            optimizer.zero_grad()
            fabric.backward(loss)
            optimizer.step()
            total += fabric.all_reduce(loss.detach()).item()
        fabric.print(f"epoch {epoch}: loss {total / len(loader):.3f}")


if __name__ == "__main__":
    main()
