"""Trains under ``onefold run --checkpoint``, and is stopped by itself: ``scheduled.py KIND STEP``.

Device 0 asks for the stop after that step of this process; 0 for none. ``epoch``: the trainer steps
the schedule when an epoch ends. ``plateau``: the script does, by a score. ``batches``: the script
does, after each step. ``early``: it does, before the first step of an epoch. ``twice``: each batch
is used for two steps. ``odd``: some batches are.
"""

from __future__ import annotations

import os
import signal
import sys

import torch
from torch import nn
from torch.optim import lr_scheduler as lrs

import onefold

EPOCHS = 3


def loss(model: nn.Module, batch: tuple[torch.Tensor, ...]) -> torch.Tensor:
    return (model(batch[0]) - batch[1]).square().mean(dim=1)


def main() -> None:
    kind, last = sys.argv[1], int(sys.argv[2])
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.Dropout(0.2), nn.Linear(16, 1))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    if kind == "plateau":
        schedule: lrs.LRScheduler = lrs.ReduceLROnPlateau(optimizer, patience=0, threshold=0.9)
    else:
        schedule = lrs.ExponentialLR(optimizer, 0.7)
    every = "epoch" if kind in ("epoch", "twice", "odd") else "script"
    trainer = onefold.Trainer(
        model, optimizer, loss, shards=4, schedule=schedule, schedule_every=every
    )
    inputs = torch.randn(20, 8)
    data = torch.utils.data.TensorDataset(inputs, inputs[:, :1] * inputs[:, 1:2])
    train = trainer.loader(data, batch_size=8, shuffle=True)
    steps = 0
    for epoch in trainer.epochs(EPOCHS):
        if kind == "early" and epoch > 0:
            schedule.step()
        for batch in train:
            uses = 2 if kind == "twice" or (kind == "odd" and epoch == 1) else 1
            for _ in range(uses):
                step = trainer.step(batch)
                steps += 1
                if trainer.is_lead:
                    print(step.number, optimizer.param_groups[0]["lr"], flush=True)
                if steps == last and trainer.is_lead:
                    os.kill(os.getpid(), signal.SIGTERM)
            if kind == "batches":
                schedule.step()
        if kind == "plateau":
            scores = trainer.evaluate(lambda m, b: {"loss": loss(m, b)}, data, batch_size=8)
            schedule.step(scores["loss"])
    print(trainer.fingerprint(), flush=True)


main()
