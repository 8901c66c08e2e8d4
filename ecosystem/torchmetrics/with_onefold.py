"""The script with onefold: the loss returns the rows from which the metric is computed."""

import torch
import torch.nn.functional as F
from ecosystem.common import BATCH, EPOCHS, SHARDS, network, points, report
from torch.utils.data import TensorDataset
from torchmetrics.classification import MulticlassAccuracy

import onefold


def loss(model, batch):
    x, y = batch
    logits = model(x)
    return F.cross_entropy(logits, y, reduction="none"), {}, {"logits": logits, "y": y}


model = network()
optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
trainer = onefold.Trainer(model, optimizer, loss, shards=SHARDS)
accuracy, history = MulticlassAccuracy(num_classes=2), []
loader = trainer.loader(TensorDataset(*points()), batch_size=BATCH)
for _ in trainer.epochs(EPOCHS):
    for batch in loader:
        step = trainer.step(batch)
        accuracy.update(step.outputs["logits"], step.outputs["y"])
    history.append(accuracy.compute())
    accuracy.reset()
report(model, history)
