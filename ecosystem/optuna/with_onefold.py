"""The script with onefold: each trial makes its Trainer, the same on every device."""

import optuna
import torch
import torch.nn.functional as F
from ecosystem.common import BATCH, SHARDS, network, points, report
from torch.utils.data import TensorDataset

import onefold

found = []


def loss(model, batch):
    x, y = batch
    return F.cross_entropy(model(x), y, reduction="none")


def objective(trial):
    model = network()
    optimizer = torch.optim.Adam(
        model.parameters(), lr=trial.suggest_float("lr", 1e-3, 1e-1, log=True)
    )
    trainer = onefold.Trainer(model, optimizer, loss, shards=SHARDS)
    for batch in trainer.loader(TensorDataset(*points()), batch_size=BATCH):
        step = trainer.step(batch)
    found.append(model)
    return float(step.loss)


study = optuna.create_study(sampler=optuna.samplers.TPESampler(seed=0))
study.optimize(objective, n_trials=3)
report(found[study.best_trial.number])
