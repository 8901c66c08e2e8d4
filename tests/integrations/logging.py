"""A run that writes its numbers. Also called in launched processes."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

import onefold
from onefold.integrations.loggers import log_steps
from tests.small import Batch, line, points, sgd

STEPS = 6
EVERY = 2


def loss(model: torch.nn.Module, batch: Batch) -> Any:
    inputs, targets = batch
    found = model(inputs)
    return (found - targets).square().mean(dim=1), {"size": found.detach().abs().mean()}


def trainer_of(devices: Sequence[str] | None) -> onefold.Trainer:
    model = line()
    return onefold.Trainer(model, sgd(model), loss, shards=3, devices=devices)


def logged(folder: str, devices: Sequence[str] | None = None) -> None:
    """Write a file in a folder on each device that has a logger of its own."""
    trainer = trainer_of(devices)
    path = Path(folder) / "device-0.log"

    def write(numbers: dict[str, float], step: int) -> None:
        numbers = {name: value for name, value in numbers.items() if "per_s" not in name}
        with path.open("a") as file:
            file.write(json.dumps([step, numbers]) + "\n")

    log_steps(trainer, write if trainer.is_lead else None, every=EVERY)
    for _ in range(STEPS):
        trainer.step(points(8))
    trainer.close()
