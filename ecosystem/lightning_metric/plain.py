"""A module of Lightning that keeps an accuracy over each pass, trained by its Trainer."""

import lightning
import torch
import torch.nn.functional as F
from ecosystem.common import BATCH, EPOCHS, network, points, report
from torch.utils.data import DataLoader, TensorDataset
from torchmetrics.classification import MulticlassAccuracy


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


trainer = lightning.Trainer(
    max_epochs=EPOCHS, accelerator="cpu", devices=1, logger=False, enable_checkpointing=False
)
model = Classifier()
trainer.fit(model, DataLoader(TensorDataset(*points()), batch_size=BATCH))
report(model, model.history)
