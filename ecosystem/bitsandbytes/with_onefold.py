"""The script with onefold: the optimizer stays as it is."""

import bitsandbytes
import torch
import torch.nn.functional as F
from ecosystem.common import BATCH, EPOCHS, SHARDS, points, report
from torch.utils.data import TensorDataset

import onefold


def loss(model, batch):
    x, y = batch
    return F.cross_entropy(model(x), y, reduction="none")


torch.manual_seed(0)
model = torch.nn.Sequential(torch.nn.Linear(8, 1024), torch.nn.ReLU(), torch.nn.Linear(1024, 2))
optimizer = bitsandbytes.optim.AdamW8bit(model.parameters(), lr=0.01)
trainer = onefold.Trainer(model, optimizer, loss, shards=SHARDS)
loader = trainer.loader(TensorDataset(*points()), batch_size=BATCH)
for _ in trainer.epochs(EPOCHS):
    for batch in loader:
        trainer.step(batch)
report(model)
