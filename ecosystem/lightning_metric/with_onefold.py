"""The script with onefold: `training_step` is the loss, and updates a metric."""

import lightning
import torch
import torch.nn.functional as F
from ecosystem.common import BATCH, EPOCHS, SHARDS, network, points, report
from torch.utils.data import TensorDataset
from torchmetrics.classification import MulticlassAccuracy

import onefold


class Classifier(lightning.LightningModule):
    def __init__(self):
        super().__init__()
        self.network = network()
        self.accuracy, self.history = MulticlassAccuracy(num_classes=2), []

    def training_step(self, batch, index):
        x, y = batch
        logits = self.network(x)
        loss = F.cross_entropy(logits, y)
        self.accuracy.update(logits, y)
        return loss

    def on_train_epoch_end(self):
        self.history.append(self.accuracy.compute())
        self.accuracy.reset()

    def configure_optimizers(self):
        return torch.optim.Adam(self.parameters(), lr=0.01)


def loss(model, batch):
    return model.training_step(batch, 0)


model = Classifier()
trainer = onefold.Trainer(model, model.configure_optimizers(), loss, shards=SHARDS)
loader = trainer.loader(TensorDataset(*points()), batch_size=BATCH)
for _ in trainer.epochs(EPOCHS):
    for batch in loader:
        trainer.step(batch)
    model.on_train_epoch_end()
report(model, model.history)
