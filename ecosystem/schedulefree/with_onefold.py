"""The script with onefold: the modes of the optimizer write to the weights, inside a block."""

import schedulefree
import torch.nn.functional as F
from ecosystem.common import BATCH, EPOCHS, SHARDS, network, points, report
from torch.utils.data import TensorDataset

import onefold


def loss(model, batch):
    x, y = batch
    return F.cross_entropy(model(x), y, reduction="none")


model = network()
optimizer = schedulefree.AdamWScheduleFree(model.parameters(), lr=0.01, warmup_steps=5)
trainer = onefold.Trainer(model, optimizer, loss, shards=SHARDS)
loader = trainer.loader(TensorDataset(*points()), batch_size=BATCH)
for _ in trainer.epochs(EPOCHS):
    with trainer.modifying():
        optimizer.train()
    for batch in loader:
        trainer.step(batch)
    with trainer.modifying():
        optimizer.eval()
report(model)
