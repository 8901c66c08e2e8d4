"""The task of with_onefold.py, with Lightning.

python examples/move/with_lightning.py
"""

import torch
import torch.nn.functional as F
from lightning.pytorch import LightningModule, Trainer, seed_everything
from torch import nn
from torch.utils.data import DataLoader, TensorDataset


class Classifier(LightningModule):
    def __init__(self):
        super().__init__()
        self.model = nn.Sequential(nn.Linear(2, 32), nn.ReLU(), nn.Linear(32, 2))

    def training_step(self, batch, index):
        x, y = batch
        loss = F.cross_entropy(self.model(x), y)
        self.log("loss", loss, on_step=False, on_epoch=True, sync_dist=True)
        return loss

    def on_train_epoch_end(self):
        loss = self.trainer.callback_metrics["loss"]
        self.print(f"epoch {self.current_epoch}: loss {loss:.3f}")

    def configure_optimizers(self):
        return torch.optim.Adam(self.parameters(), lr=0.01)


def main(epochs=5, devices="auto"):
    seed_everything(0)
    x = torch.randn(2048, 2)
    data = TensorDataset(x, (x[:, 0] * x[:, 1] > 0).long())

    trainer = Trainer(
        max_epochs=epochs, devices=devices, strategy="ddp", logger=False, enable_checkpointing=False
    )
    loader = DataLoader(data, batch_size=64 // trainer.num_devices, shuffle=True)
    trainer.fit(Classifier(), loader)


if __name__ == "__main__":
    main()
