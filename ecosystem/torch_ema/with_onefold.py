"""The script with onefold: the library's average is updated after each step."""

import torch
import torch.nn.functional as F
from ecosystem.common import BATCH, EPOCHS, SHARDS, network, points, report
from torch.utils.data import TensorDataset
from torch_ema import ExponentialMovingAverage

import onefold


def loss(model, batch):
    x, y = batch
    return F.cross_entropy(model(x), y, reduction="none")


model = network()
optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
trainer = onefold.Trainer(model, optimizer, loss, shards=SHARDS)
average = ExponentialMovingAverage(model.parameters(), decay=0.95)
loader = trainer.loader(TensorDataset(*points()), batch_size=BATCH)
for _ in trainer.epochs(EPOCHS):
    for batch in loader:
        trainer.step(batch)
        average.update()
report(model, average.shadow_params)
