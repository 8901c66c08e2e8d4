"""A plain loop that logs to wandb."""

import torch
import torch.nn.functional as F
import wandb
from ecosystem.common import BATCH, EPOCHS, network, points, report
from torch.utils.data import DataLoader, TensorDataset

model = network()
optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
loader = DataLoader(TensorDataset(*points()), batch_size=BATCH)
run = wandb.init(project="ecosystem")
for _ in range(EPOCHS):
    for x, y in loader:
        loss = F.cross_entropy(model(x), y)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        run.log({"train/loss": loss.item()})
run.finish()
report(model)
