"""The script with onefold: the lead logs the losses of whole batches."""

import mlflow
import torch
import torch.nn.functional as F
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
if trainer.is_lead:
    mlflow.set_tracking_uri("sqlite:///mlflow.db")
    mlflow.start_run()
log_steps(trainer, mlflow if trainer.is_lead else None)
for _ in trainer.epochs(EPOCHS):
    for batch in loader:
        trainer.step(batch)
if trainer.is_lead:
    mlflow.end_run()
report(model)
