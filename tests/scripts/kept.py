"""Trains a small model for some epochs and writes down which samples each step used.

``kept.py RECORD SECONDS [WIDTH]`` waits so long after each step; a wider model takes longer to be
saved. Under ``onefold run --checkpoint`` it goes on without knowing.
"""

from __future__ import annotations

import sys
import time
from pathlib import Path

import torch
from torch import nn

import onefold

SAMPLES = 131
BATCH = 24
EPOCHS = 4


class Numbered(torch.utils.data.Dataset[tuple[torch.Tensor, torch.Tensor, int]]):
    """Samples that are augmented, with their own numbers."""

    def __len__(self) -> int:
        return SAMPLES

    def __getitem__(self, index: int) -> tuple[torch.Tensor, torch.Tensor, int]:
        inputs = torch.linspace(-1, 1, 16) * (index + 1) / SAMPLES
        return inputs + 0.1 * torch.randn(16), torch.tensor(index % 3), index


def main() -> None:
    record, seconds = Path(sys.argv[1]), float(sys.argv[2])
    width = int(sys.argv[3]) if len(sys.argv) > 3 else 300
    torch.manual_seed(0)
    model = nn.Sequential(
        nn.Linear(16, width), nn.BatchNorm1d(width), nn.Dropout(0.2), nn.Linear(width, 3)
    )
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, 40)

    def loss(
        model: nn.Module, batch: tuple[torch.Tensor, torch.Tensor, torch.Tensor]
    ) -> torch.Tensor:
        inputs, labels, samples = batch
        with record.open("a") as file:  # one short line: whole, whoever else writes
            file.write(f"{trainer.steps + 1} {' '.join(map(str, samples.tolist()))}\n")
        return nn.functional.cross_entropy(model(inputs), labels, reduction="none")

    trainer = onefold.Trainer(model, optimizer, loss, shards=4, seed=5, schedule=schedule)
    batches = trainer.loader(Numbered(), batch_size=BATCH, shuffle=True)
    print("ready", flush=True)
    for _ in trainer.epochs(EPOCHS):
        for batch in batches:
            trainer.step(batch)
            time.sleep(seconds)
    print(f"end {trainer.steps} {trainer.fingerprint()}", flush=True)


main()
