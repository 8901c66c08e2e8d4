"""The model that most tests of this folder train, its batches and its trainers."""

import itertools
import math
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

import onefold
import onefold.trainer
from onefold.core.options import LaunchContext, RunOptions
from onefold.session import forming
from tests.apart import apart
from tests.gpu.device import DEVICE

Batch = tuple[torch.Tensor, torch.Tensor]
SAMPLES = 18
"""Uneven shards for 4 and for 7."""
SPOILT = 9
"""The label that one sample in the second of four shards has."""


class Net(nn.Module):
    """Convolution, both kinds of normalization, dropout, and layers of several segments."""

    def __init__(self, dropout: float = 0.1) -> None:
        super().__init__()
        self.dropout = dropout
        self.conv = nn.Conv2d(1, 8, 3, padding=1)
        self.batch_norm = nn.BatchNorm2d(8)
        self.layer_norm = nn.LayerNorm(8 * 49)
        self.hidden = nn.Linear(8 * 49, 200)
        self.out = nn.Linear(200, 10)

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        found = F.max_pool2d(self.batch_norm(self.conv(images)).relu(), 2).flatten(1)
        hidden = self.hidden(self.layer_norm(found)).relu()
        return self.out(F.dropout(hidden, self.dropout, self.training))


class Spoilt:
    """The loss, but for a factor in the shard with the label that is spoilt, where it is on."""

    def __init__(self, factor: float = math.nan) -> None:
        self.factor = factor
        self.on = False

    def __call__(self, model: nn.Module, batch: Batch) -> torch.Tensor:
        losses = loss(model, batch)
        # A tensor's answer is not asked for: nothing here waits for a GPU.
        here = (batch[1] == SPOILT).any()
        return torch.where(here, losses * self.factor, losses) if self.on else losses


def loss(model: nn.Module, batch: Batch) -> torch.Tensor:
    """One loss a sample."""
    images, labels = batch
    return F.cross_entropy(model(images), labels, reduction="none")


def adamw(model: nn.Module, **settings: Any) -> torch.optim.Optimizer:
    """The optimizer of most tests."""
    return torch.optim.AdamW(model.parameters(), lr=1e-3, **settings)


def sgd(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9)


def adafactor(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.Adafactor(model.parameters())


def batches(steps: int, samples: int = SAMPLES, device: str = "cpu") -> list[Batch]:
    """The same batches each time; sample 6 has the label that is spoilt."""
    generator = torch.Generator().manual_seed(1)
    found = []
    for _ in range(steps):
        labels = torch.randint(0, 9, (samples,), generator=generator)
        labels[6] = SPOILT
        images = torch.randn(samples, 1, 14, 14, generator=generator)
        found.append((images.to(device), labels.to(device)))
    return found


def trainer_of(
    devices: int = 1,
    *,
    on: str | list[str] = DEVICE,
    model: nn.Module | None = None,
    loss: Any = loss,
    shards: int = 4,
    optimizer: Any = adamw,
    **options: Any,
) -> onefold.Trainer:
    """A trainer whose devices this process drives, all of them on one card if but one is named."""
    torch.manual_seed(0)
    model = model or Net()
    places = [on] * devices if isinstance(on, str) else on
    made = optimizer(model)
    return onefold.Trainer(model, made, loss, shards=shards, devices=places, threads=1, **options)


def result(trainer: onefold.Trainer, steps: Sequence[Batch]) -> tuple[str, str, float]:
    """Train, and return fingerprint, last loss and last norm, to the last bit."""
    last = [trainer.step(batch) for batch in steps][-1]
    return trainer.fingerprint(), float(last.loss).hex(), last.grad_norm


def trained(steps: Sequence[Batch], **options: Any) -> tuple[str, str, float]:
    """The same of a trainer with these options."""
    trainer = trainer_of(**options)
    found = result(trainer, steps)
    trainer.close()
    return found


@contextmanager
def keeping(placement: str, **options: Any) -> Iterator[None]:
    """Have trainers here keep so much of their models; the rest lies in another memory.

    Args:
        placement: of the model.
        **options: other fields of `RunOptions`.
    """
    module: Any = onefold.trainer
    before, numbers = module.current_context, forming._trainers
    # The first Trainer in it is the first of a run, whose record is written.
    forming._trainers = itertools.count()
    module.current_context = lambda: LaunchContext(
        options=RunOptions(placement=placement, **options)
    )
    try:
        with apart():
            yield
    finally:
        module.current_context = before
        forming._trainers = numbers


def score(model: nn.Module, batch: Batch) -> dict[str, Any]:
    images, labels = batch
    logits = model(images)
    losses = F.cross_entropy(logits, labels, reduction="none")
    kept = (labels != 3).float()
    by_label = onefold.Mean((losses * kept).sum(), float(len(labels)))
    return {"loss": losses, "accuracy": logits.argmax(1) == labels, "kept": by_label}


def logits_of(model: nn.Module, batch: Batch) -> dict[str, torch.Tensor]:
    return {"logits": model(batch[0]), "labels": batch[1]}
