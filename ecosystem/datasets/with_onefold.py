"""The script with onefold: the data set stays as it is."""

import datasets
import torch
import torch.nn.functional as F
from ecosystem.common import BATCH, EPOCHS, SHARDS, network, points, report

import onefold


def loss(model, batch):
    return F.cross_entropy(model(batch["x"]), batch["y"], reduction="none")


x, y = points()
data = datasets.Dataset.from_dict({"x": x.tolist(), "y": y.tolist()})
data = data.map(lambda row: {"x": [2 * value for value in row["x"]]}).with_format("torch")
model = network()
optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
trainer = onefold.Trainer(model, optimizer, loss, shards=SHARDS)
loader = trainer.loader(data, batch_size=BATCH)
for _ in trainer.epochs(EPOCHS):
    for batch in loader:
        trainer.step(batch)
report(model)
