"""The script with onefold: no splitting by nodes, as each device reads the whole stream."""

import torch
import torch.nn.functional as F
import webdataset
from ecosystem.common import BATCH, EPOCHS, SHARDS, network, report

import onefold


def loss(model, batch):
    x, y = batch
    return F.cross_entropy(model(x), y, reduction="none")


data = webdataset.WebDataset("points-{0..3}.tar", shardshuffle=False)
data = data.shuffle(30, seed=3).decode().to_tuple("x.npy", "y.cls")
model = network()
optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
trainer = onefold.Trainer(model, optimizer, loss, shards=SHARDS)
loader = trainer.loader(data, batch_size=BATCH)
for _ in trainer.epochs(EPOCHS):
    for batch in loader:
        trainer.step(batch)
report(model)
