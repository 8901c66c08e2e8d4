"""A loop of Accelerate."""

import torch
import torch.nn.functional as F
from accelerate import Accelerator
from ecosystem.common import BATCH, EPOCHS, network, points, report
from torch.utils.data import DataLoader, TensorDataset

accelerator = Accelerator(cpu=True)
model = network()
optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
loader = DataLoader(TensorDataset(*points()), batch_size=BATCH)
model, optimizer, loader = accelerator.prepare(model, optimizer, loader)
for _ in range(EPOCHS):
    for x, y in loader:
        loss = F.cross_entropy(model(x), y)
        optimizer.zero_grad()
        accelerator.backward(loss)
        optimizer.step()
report(accelerator.unwrap_model(model))
