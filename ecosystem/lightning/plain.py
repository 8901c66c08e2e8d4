"""A module of Lightning, trained by its Trainer."""

import lightning
import torch
import torch.nn.functional as F
from ecosystem.common import BATCH, EPOCHS, network, points, report
from torch.utils.data import DataLoader, TensorDataset


class Classifier(lightning.LightningModule):
    def __init__(self):
        super().__init__()
        self.network = network()

    def training_step(self, batch, index):
        x, y = batch
        logits = self.network(x)
        loss = F.cross_entropy(logits, y)
        self.log("loss", loss)
        return loss

    def configure_optimizers(self):
        return torch.optim.Adam(self.parameters(), lr=0.01)


trainer = lightning.Trainer(
    max_epochs=EPOCHS, accelerator="cpu", devices=1, logger=False, enable_checkpointing=False
)
model = Classifier()
trainer.fit(model, DataLoader(TensorDataset(*points()), batch_size=BATCH))
report(model)
