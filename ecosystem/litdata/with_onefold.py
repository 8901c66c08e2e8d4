"""The script with onefold: its loader takes the place of `StreamingDataLoader`."""

import litdata
import torch
import torch.nn.functional as F
from ecosystem.common import BATCH, EPOCHS, SHARDS, network, report

import onefold


def loss(model, batch):
    return F.cross_entropy(model(batch["x"]), batch["y"], reduction="none")


data = litdata.StreamingDataset("chunks", shuffle=False)
model = network()
optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
trainer = onefold.Trainer(model, optimizer, loss, shards=SHARDS)
loader = trainer.loader(data, batch_size=BATCH)
for _ in trainer.epochs(EPOCHS):
    for batch in loader:
        trainer.step(batch)
report(model)
