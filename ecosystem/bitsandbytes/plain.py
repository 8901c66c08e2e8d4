"""The 8-bit AdamW of bitsandbytes, in a plain loop."""

import bitsandbytes
import torch
import torch.nn.functional as F
from ecosystem.common import BATCH, EPOCHS, points, report
from torch.utils.data import DataLoader, TensorDataset

torch.manual_seed(0)
model = torch.nn.Sequential(torch.nn.Linear(8, 1024), torch.nn.ReLU(), torch.nn.Linear(1024, 2))
optimizer = bitsandbytes.optim.AdamW8bit(model.parameters(), lr=0.01)
loader = DataLoader(TensorDataset(*points()), batch_size=BATCH)
for _ in range(EPOCHS):
    for x, y in loader:
        loss = F.cross_entropy(model(x), y)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
report(model)
