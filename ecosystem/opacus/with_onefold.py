"""The script with onefold."""

import opacus
import torch
import torch.nn.functional as F
from ecosystem.common import BATCH, EPOCHS, SHARDS, network, points, report
from torch.utils.data import DataLoader, TensorDataset

import onefold


def loss(model, batch):
    x, y = batch
    return F.cross_entropy(model(x), y, reduction="none")


model = network()
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
loader = DataLoader(TensorDataset(*points()), batch_size=BATCH)
model, optimizer, loader = opacus.PrivacyEngine().make_private(
    module=model, optimizer=optimizer, data_loader=loader, noise_multiplier=1.0, max_grad_norm=1.0
)
trainer = onefold.Trainer(model, optimizer, loss, shards=SHARDS)
loader = trainer.loader(loader)
for _ in trainer.epochs(EPOCHS):
    for batch in loader:
        trainer.step(batch)
report(model)
