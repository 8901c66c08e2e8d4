"""Runs of several models, optimizers and losses; called on each device of a run."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import TensorDataset

import onefold
from tests.small import Batch

SAMPLES = 30
NAMES = ("discriminator", "generator")


class Generator(nn.Module):
    """Batch norm and dropout, and a layer of several pieces."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(4, 1100)
        self.norm = nn.BatchNorm1d(1100)
        self.last = nn.Linear(1100, 2)

    def forward(self, noise: torch.Tensor) -> torch.Tensor:
        return self.last(F.dropout(self.norm(self.first(noise)).relu(), 0.1, self.training))


def discriminator() -> nn.Module:
    return nn.Sequential(nn.Linear(2, 1050), nn.LeakyReLU(0.2), nn.Linear(1050, 1))


def loss_of_discriminator(models: Mapping[str, nn.Module], batch: Batch) -> torch.Tensor:
    real, noise = batch
    fake = models["generator"](noise)  # not detached: its gradients must be dropped
    of_real, of_fake = models["discriminator"](real), models["discriminator"](fake)
    ones, zeros = torch.ones_like(of_real), torch.zeros_like(of_fake)
    of_real = F.binary_cross_entropy_with_logits(of_real, ones, reduction="none")
    of_fake = F.binary_cross_entropy_with_logits(of_fake, zeros, reduction="none")
    return (of_real + of_fake).squeeze(1)


def loss_of_generator(models: Mapping[str, nn.Module], batch: Batch) -> torch.Tensor:
    _, noise = batch
    judged = models["discriminator"](models["generator"](noise))
    wanted = torch.ones_like(judged)
    return F.binary_cross_entropy_with_logits(judged, wanted, reduction="none").squeeze(1)


LOSSES = {"discriminator": loss_of_discriminator, "generator": loss_of_generator}


def made() -> tuple[dict[str, nn.Module], dict[str, torch.optim.Optimizer]]:
    torch.manual_seed(3)
    models = {"generator": Generator(), "discriminator": discriminator()}
    optimizers: dict[str, torch.optim.Optimizer] = {
        "generator": torch.optim.Adam(models["generator"].parameters(), lr=1e-3),
        "discriminator": torch.optim.SGD(
            models["discriminator"].parameters(), lr=1e-2, momentum=0.9, weight_decay=1e-2
        ),
    }
    return models, optimizers


def trainer_of(devices: int | None = 1, *, shards: int = 4, **choices: Any) -> onefold.Trainer:
    models, optimizers = made()
    named = None if devices is None else ["cpu"] * devices
    return onefold.Trainer(
        models, optimizers, LOSSES, shards=shards, threads=1, devices=named, **choices
    )


def batch_of(step: int, samples: int = SAMPLES) -> Batch:
    generator = torch.Generator().manual_seed(step)
    return (
        torch.randn(samples, 2, generator=generator),
        torch.randn(samples, 4, generator=generator),
    )


def data() -> TensorDataset:
    return TensorDataset(*batch_of(99, samples=30))


def train(trainer: onefold.Trainer, first: int, last: int) -> onefold.Trainer:
    """Make some rounds of two steps of one, then one of the other."""
    for number in range(first, last + 1):
        batch = batch_of(number)
        trainer.step(batch, "discriminator")
        trainer.step(batch, "discriminator")
        trainer.step(batch, "generator")
    return trainer


def judged(model: nn.Module, noise: Any) -> dict[str, torch.Tensor]:
    return {"x": model(noise[1])[:, 0]}


def all_of_it(devices: int | None, directory: str) -> tuple[str, ...]:
    """Train, save in the middle, show the average, score one of the models."""
    trainer = trainer_of(devices)
    trainer.average(decay=0.9, after="generator")
    train(trainer, 1, 2)
    trainer.save(Path(directory))
    train(trainer, 3, 4)
    scores = trainer.evaluate(judged, data(), batch_size=8, model="generator")
    with trainer.averaged():
        averaged = trainer.fingerprint()
    found = trainer.fingerprint(), averaged, scores["x"].hex()
    trainer.close()
    return found


def one_steps_another_loss() -> str:
    """Device 1 steps the generator where the others step the discriminator."""
    trainer = trainer_of(None)
    name = "discriminator" if trainer.is_lead else "generator"
    try:
        trainer.step(batch_of(1), name)
    except onefold.errors.DisagreementError as error:
        return str(error)
    return ""
