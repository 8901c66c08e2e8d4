"""The script with onefold, which takes over the loader."""

import torch
import torch.nn.functional as F
from ecosystem.common import BATCH, EPOCHS, SHARDS, network, points, report
from torch.utils.data import TensorDataset
from torchdata.stateful_dataloader import StatefulDataLoader

import onefold


def loss(model, batch):
    x, y = batch
    return F.cross_entropy(model(x), y, reduction="none")


model = network()
optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
trainer = onefold.Trainer(model, optimizer, loss, shards=SHARDS)
loader = trainer.loader(StatefulDataLoader(TensorDataset(*points()), batch_size=BATCH))
for _ in trainer.epochs(EPOCHS):
    for batch in loader:
        trainer.step(batch)
report(model)
