"""Runs whose batches come in every way there is, in parts. Also called in launched processes."""

import random
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import (
    DataLoader,
    Dataset,
    IterableDataset,
    RandomSampler,
    Sampler,
    WeightedRandomSampler,
)

import onefold

EPOCHS = 3
SAMPLES = 26
BATCH = 7

Sample = tuple[torch.Tensor, torch.Tensor]


def _values() -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(1)
    return torch.randn(SAMPLES, 6, generator=generator), torch.randn(
        SAMPLES, 1, generator=generator
    )


class Points(Dataset[Sample]):
    """Each is augmented whenever it is read."""

    def __init__(self) -> None:
        self._inputs, self._targets = _values()

    def __len__(self) -> int:
        return SAMPLES

    def __getitem__(self, index: int) -> Sample:
        return self._inputs[index] + 0.1 * torch.randn(6), self._targets[index] * random.random()


class Flow(IterableDataset[Sample]):
    """Shuffles in a buffer, by the global generators."""

    def __iter__(self) -> Iterator[Sample]:
        inputs, targets = _values()
        waiting: list[int] = []
        shift = torch.randn(())
        for index in range(SAMPLES):
            waiting.append(index)
            if len(waiting) > 5:
                chosen = waiting.pop(random.randrange(len(waiting)))
                yield inputs[chosen] + 0.1 * torch.randn(6) + shift, targets[chosen]
        for chosen in waiting:
            yield inputs[chosen], targets[chosen]


class KnowingFlow(IterableDataset[Sample]):
    """Goes on by itself; it notes what it is made to read."""

    def __init__(self) -> None:
        self._inputs, self._targets = _values()
        self._start = self._place = 0
        self._waiting: list[int] = []
        self.read: list[int] = []

    def __iter__(self) -> Iterator[Sample]:
        self._place, self._start = self._start, 0
        if not self._place:
            self._waiting = []
        while self._place < SAMPLES or self._waiting:
            if self._place < SAMPLES:
                self.read.append(self._place)
                self._waiting.append(self._place)
                self._place += 1
                if len(self._waiting) <= 5 and self._place < SAMPLES:
                    continue
            chosen = self._waiting.pop(random.randrange(len(self._waiting)))
            yield self._inputs[chosen] + 0.1 * torch.randn(6), self._targets[chosen]

    def state_dict(self) -> dict[str, Any]:
        return {"place": self._place, "waiting": self._waiting}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self._start, self._waiting = state["place"], list(state["waiting"])


class ByLength(Sampler[list[int]]):
    """Batches of 3 to 9 samples, in another order in each epoch."""

    def __init__(self) -> None:
        self._epoch = 0

    def set_epoch(self, epoch: int) -> None:
        self._epoch = epoch

    def __len__(self) -> int:
        return 5

    def __iter__(self) -> Iterator[list[int]]:
        generator = torch.Generator().manual_seed(self._epoch)
        order = torch.randperm(SAMPLES, generator=generator).tolist()
        for size in (3, 9, 4, 6, 4):
            batch, order = order[:size], order[size:]
            yield batch


class WholeItems(Dataset[Sample]):
    """Each item is a whole batch, of 5 to 9 samples."""

    def __len__(self) -> int:
        return 5

    def __getitem__(self, index: int) -> Sample:
        inputs, targets = _values()
        size = 5 + index
        return inputs[index : index + size] + 0.1 * torch.randn(6), targets[index : index + size]


def batch_fn(step: int, generator: torch.Generator) -> Sample:
    """As nanoGPT takes pieces of a text, from the host's generators of both kinds."""
    inputs, targets = _values()
    places = torch.randint(SAMPLES, (BATCH + step % 3,), generator=generator)
    return inputs[places] + 0.1 * torch.randn(6), targets[places] + random.random()


def weights() -> list[float]:
    return [1.0 + index % 4 for index in range(SAMPLES)]


def batches_of(kind: str, trainer: onefold.Trainer, workers: int) -> onefold.Loader:
    """A loader of each kind."""
    data = Points()
    if kind == "weighted":
        sampler = WeightedRandomSampler(weights(), 30)
        return trainer.loader(data, batch_size=BATCH, sampler=sampler, num_workers=workers)
    if kind == "own generator":
        drawn = RandomSampler(data, True, 23, generator=torch.Generator().manual_seed(5))
        return trainer.loader(DataLoader(data, BATCH, sampler=drawn, num_workers=workers))
    if kind == "batch sampler":
        return trainer.loader(data, batch_sampler=ByLength(), workers=workers)
    if kind == "taken over":
        return trainer.loader(DataLoader(data, BATCH, shuffle=True, num_workers=workers))
    if kind == "items":
        return trainer.loader(
            DataLoader(WholeItems(), batch_size=None, shuffle=True, num_workers=workers)
        )
    if kind == "stream":
        return trainer.loader(Flow(), batch_size=BATCH, workers=min(workers, 1))
    if kind == "knowing stream":
        return trainer.loader(DataLoader(KnowingFlow(), BATCH, num_workers=workers))
    assert kind == "rule"
    return trainer.batches(batch_fn, per_epoch=4)


KINDS = (
    *("weighted", "own generator", "batch sampler", "taken over", "items", "stream"),
    *("knowing stream", "rule"),
)
STEPS_OF_AN_EPOCH = {"weighted": 5, "batch sampler": 5, "items": 5}
"""Where they are not four."""


def loss(model: nn.Module, batch: Sample) -> torch.Tensor:
    inputs, targets = batch
    return F.dropout(model(inputs) - targets, 0.1, model.training).square().mean(dim=1)


def run_part(
    kind: str,
    workers: int,
    folder: Path,
    stop_after: int | None,
    shares: Sequence[int] | None = None,
    devices: Sequence[str] | None = None,
) -> tuple[int, str]:
    """Go on from a folder if there is something in it, and stop after a step or at the end."""
    torch.manual_seed(4)
    model = nn.Sequential(nn.Linear(6, 8), nn.LayerNorm(8), nn.Linear(8, 1))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    trainer = onefold.Trainer(
        model, optimizer, loss, shards=4, seed=2, devices=devices, threads=1, shares=shares
    )
    batches = batches_of(kind, trainer, workers)
    if folder.is_dir():
        trainer.load(folder)
    # The script's own draws must not matter to anything that is read.
    random.seed(trainer.steps + len(trainer.devices))
    for _ in trainer.epochs(EPOCHS):
        for batch in batches:
            random.random()
            step = trainer.step(batch)
            if shares is not None and step.number % 3 == 0:
                trainer.shares = trainer.shares[::-1]
            if step.number == stop_after:
                trainer.save(folder)
                result = step.number, trainer.fingerprint()
                trainer.close()
                return result
    result = trainer.steps, trainer.fingerprint()
    trainer.close()
    return result
