"""The script with onefold: the lead logs the losses of whole batches."""

import torch
import torch.nn.functional as F
import wandb
from ecosystem.common import BATCH, EPOCHS, SHARDS, network, points, report
from torch.utils.data import TensorDataset

import onefold
from onefold.integrations.loggers import log_steps


def loss(model, batch):
    x, y = batch
    return F.cross_entropy(model(x), y, reduction="none")


model = network()
optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
trainer = onefold.Trainer(model, optimizer, loss, shards=SHARDS)
loader = trainer.loader(TensorDataset(*points()), batch_size=BATCH)
run = wandb.init(project="ecosystem") if trainer.is_lead else None
log_steps(trainer, run)
for _ in trainer.epochs(EPOCHS):
    for batch in loader:
        trainer.step(batch)
if trainer.is_lead:
    run.finish()
report(model)
