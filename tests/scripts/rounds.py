"""Prunes a model in three rounds, each by a Trainer of its own: ``rounds.py [fail]``."""

import os
import shutil
import sys
from typing import Any

import torch
from torch import nn

import onefold

torch.manual_seed(0)
model = nn.Sequential(nn.Linear(6, 16), nn.ReLU(), nn.Linear(16, 3))
data = torch.utils.data.TensorDataset(torch.randn(64, 6), torch.randint(3, (64,)))


def loss(model: nn.Module, batch: Any) -> torch.Tensor:
    return onefold.losses.cross_entropy(model(batch[0]), batch[1])


def score(model: nn.Module, batch: Any) -> dict[str, torch.Tensor]:
    return {"accuracy": (model(batch[0]).argmax(1) == batch[1]).double()}


for _ in range(3):
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    trainer = onefold.Trainer(model, optimizer, loss, shards=4)
    loader = trainer.loader(data, batch_size=16, shuffle=True)
    best = 0.0
    for _ in trainer.epochs(5):
        for batch in loader:
            trainer.step(batch)
        accuracy = trainer.evaluate(score, data, batch_size=16)["accuracy"]
        if accuracy >= best and trainer.is_lead:
            torch.save(obj=model.state_dict(), f="last.pt.part")
            os.replace("last.pt.part", "last.pt")
            shutil.copyfile("last.pt", "best.pt")
        best = max(best, accuracy)
    trainer.barrier()
    trainer.close()
    model.load_state_dict(torch.load("best.pt"))
    weight = model.get_parameter("0.weight")
    with torch.no_grad():
        weight[weight.abs() < weight.abs().median()] = 0
if "fail" in sys.argv:
    raise AssertionError("the accuracy is too low")
