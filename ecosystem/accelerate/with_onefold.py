"""The script with onefold, from which Accelerate was not removed."""

import torch
import torch.nn.functional as F
from accelerate import Accelerator
from ecosystem.common import BATCH, EPOCHS, SHARDS, network, points, report
from torch.utils.data import DataLoader, TensorDataset

import onefold


def loss(model, batch):
    x, y = batch
    return F.cross_entropy(model(x), y, reduction="none")


accelerator = Accelerator(cpu=True)
model = network()
optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
loader = DataLoader(TensorDataset(*points()), batch_size=BATCH)
model, optimizer, loader = accelerator.prepare(model, optimizer, loader)
trainer = onefold.Trainer(model, optimizer, loss, shards=SHARDS)
loader = trainer.loader(loader)
for _ in trainer.epochs(EPOCHS):
    for batch in loader:
        trainer.step(batch)
report(accelerator.unwrap_model(model))
