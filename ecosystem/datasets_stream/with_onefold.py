"""The script with onefold, which reads the whole stream on each device."""

import datasets
import torch
import torch.nn.functional as F
from ecosystem.common import BATCH, EPOCHS, SHARDS, network, points, report

import onefold


def loss(model, batch):
    return F.cross_entropy(model(batch["x"]), batch["y"], reduction="none")


x, y = points()
data = datasets.Dataset.from_dict({"x": x.tolist(), "y": y.tolist()}).with_format("torch")
data = data.to_iterable_dataset(num_shards=4).shuffle(seed=3, buffer_size=30)
model = network()
optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
trainer = onefold.Trainer(model, optimizer, loss, shards=SHARDS)
loader = trainer.loader(data, batch_size=BATCH)
for _ in trainer.epochs(EPOCHS):
    for batch in loader:
        trainer.step(batch)
report(model)
