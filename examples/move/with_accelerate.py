"""The task of with_onefold.py, with Accelerate.

accelerate launch --num_processes 2 examples/move/with_accelerate.py
"""

import torch
import torch.nn.functional as F
from accelerate import Accelerator
from accelerate.utils import set_seed
from torch import nn
from torch.utils.data import DataLoader, TensorDataset


def main(epochs=5):
    accelerator = Accelerator()
    set_seed(0)
    x = torch.randn(2048, 2)
    data = TensorDataset(x, (x[:, 0] * x[:, 1] > 0).long())
    model = nn.Sequential(nn.Linear(2, 32), nn.ReLU(), nn.Linear(32, 2))
    optimizer = torch.optim.Adam(model.parameters(), lr=0.01)

    loader = DataLoader(data, batch_size=64 // accelerator.num_processes, shuffle=True)
    model, optimizer, loader = accelerator.prepare(model, optimizer, loader)
    for epoch in range(epochs):
        total = 0.0
        for x, y in loader:
            loss = F.cross_entropy(model(x), y)
            optimizer.zero_grad()
            accelerator.backward(loss)
            optimizer.step()
            total += accelerator.gather(loss.detach()).mean().item()
        accelerator.print(f"epoch {epoch}: loss {total / len(loader):.3f}")
    accelerator.end_training()


if __name__ == "__main__":
    main()
