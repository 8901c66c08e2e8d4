"""A study of optuna over learning rates, in a plain loop."""

import optuna
import torch
import torch.nn.functional as F
from ecosystem.common import BATCH, network, points, report
from torch.utils.data import DataLoader, TensorDataset

found = []


def objective(trial):
    model = network()
    optimizer = torch.optim.Adam(
        model.parameters(), lr=trial.suggest_float("lr", 1e-3, 1e-1, log=True)
    )
    for x, y in DataLoader(TensorDataset(*points()), batch_size=BATCH):
        loss = F.cross_entropy(model(x), y)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    found.append(model)
    return loss.item()


study = optuna.create_study(sampler=optuna.samplers.TPESampler(seed=0))
study.optimize(objective, n_trials=3)
report(found[study.best_trial.number])
