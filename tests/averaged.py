"""Runs that keep an average; called on each device of a run."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import TensorDataset

import onefold
from onefold.run.world import current_world
from tests.small import Batch

SAMPLES = 14


class Net(nn.Module):
    """Batch norm, dropout, a frozen layer, a layer of several pieces, and odd buffers."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.BatchNorm1d(20)
        self.frozen = nn.Linear(20, 20).requires_grad_(False)
        self.wide = nn.Linear(20, 1000)
        self.out = nn.Linear(1000, 4)
        self.register_buffer("mask", torch.tensor([0.0, float("-inf")]), persistent=False)

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        hidden = self.wide(self.frozen(self.norm(inputs))).relu()
        return self.out(F.dropout(hidden, 0.1, self.training))


def loss(model: nn.Module, batch: Batch) -> torch.Tensor:
    inputs, labels = batch
    return F.cross_entropy(model(inputs), labels, reduction="none")


def score(model: nn.Module, batch: Batch) -> dict[str, torch.Tensor]:
    return {"loss": loss(model, batch)}


def batch_of(step: int, samples: int = SAMPLES) -> Batch:
    generator = torch.Generator().manual_seed(step)
    inputs = torch.randn(samples, 20, generator=generator)
    return inputs, torch.randint(0, 4, (samples,), generator=generator)


def data() -> TensorDataset:
    return TensorDataset(*batch_of(99, samples=30))


def trainer_of(
    devices: int | None = 1,
    *,
    model: nn.Module | None = None,
    shards: int = 4,
    function: Callable[..., object] = loss,
    **options: object,
) -> onefold.Trainer:
    """With None, a launched process finds its own device."""
    torch.manual_seed(0)
    model = model or Net()
    optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=1e-2)
    return onefold.Trainer(
        model,
        optimizer,
        function,
        shards=shards,
        devices=["cpu"] * devices if devices else None,
        threads=1,
        **options,  # type: ignore[arg-type]
    )


def train(trainer: onefold.Trainer, first: int, last: int) -> onefold.Trainer:
    """The steps of these numbers."""
    for step in range(first, last + 1):
        trainer.step(batch_of(step))
    return trainer


def shown(trainer: onefold.Trainer) -> str:
    """The fingerprint of the averages."""
    with trainer.averaged():
        return trainer.fingerprint()


def both(trainer: onefold.Trainer) -> tuple[str, str]:
    """The fingerprints of what is trained, and of the averages."""
    return trainer.fingerprint(), shown(trainer)


Result = tuple[str, str, float, str, float]


def all_of_it(devices: int | None, folder: str, precision: str | None = None) -> Result:
    """Averages that begin late, are evaluated, recomputed and saved."""
    trainer = train(trainer_of(devices, precision=precision), 1, 2)
    trainer.average(decay=0.9)
    train(trainer, 3, 5)
    with trainer.averaged():
        averaged = trainer.evaluate(score, data(), batch_size=9)["loss"]
        trainer.save(folder)
        trainer.barrier()
    with trainer.averaged(update_bn=data(), batch_size=10):
        recomputed = trainer.fingerprint()
    train(trainer, 6, 7)
    went_on = trainer.load(folder)
    assert went_on.step == 5
    train(trainer, 6, 8)
    result = (*both(trainer), averaged, recomputed, float(trainer.steps))
    trainer.close()
    return result


@contextmanager
def noting(trainer: onefold.Trainer, folder: Path, count: int) -> Iterator[None]:
    """Write down whether what is trained is back after an exception, once all have left."""
    before, rank = trainer.fingerprint(), current_world().rank
    try:
        yield
    except Exception as error:
        (folder / f"left-{rank}").touch()
        while len(list(folder.glob("left-*"))) < count:
            time.sleep(0.02)
        same = trainer.fingerprint() == before
        (folder / f"said-{rank}").write_text(f"{type(error).__name__} {same}")


def one_fails(folder: str) -> None:
    """The last device raises in the block, while the others evaluate."""
    trainer = train(trainer_of(None), 1, 2)
    trainer.average(mean=True)
    train(trainer, 3, 4)
    last = len(trainer.devices) - 1
    with noting(trainer, Path(folder), last + 1), trainer.averaged():
        if current_world().rank == last:
            raise KeyError("mine")
        trainer.evaluate(score, data(), batch_size=9)
