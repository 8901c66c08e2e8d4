"""Trains a small model, and lets one device come to grief: ``faulty.py KIND DEVICE STEP``."""

from __future__ import annotations

import os
import signal
import sys
import time

import torch
from torch import nn

import onefold


class Fault:
    """Happens on one device in one step."""

    def __init__(self, kind: str, device: int, step: int) -> None:
        self.kind, self.device, self.step = kind, device, step

    def strike(self, rank: int, step: int) -> None:
        """Called on every device before every step."""
        if (rank, step) != (self.device, self.step):
            return
        if self.kind == "kill":
            os.kill(os.getpid(), signal.SIGKILL)
        if self.kind == "stop":
            os.kill(os.getpid(), signal.SIGSTOP)
        if self.kind == "sleep":
            time.sleep(600)
        if self.kind == "raise":
            raise ArithmeticError("the fault that was asked for")
        if self.kind == "leave":
            sys.exit(0)
        if self.kind == "exit":
            sys.exit(3)


class Samples(torch.utils.data.Dataset[tuple[torch.Tensor, torch.Tensor]]):
    def __init__(self, bad: int) -> None:
        self._bad = bad

    def __len__(self) -> int:
        return 64

    def __getitem__(self, index: int) -> tuple[torch.Tensor, torch.Tensor]:
        if index == self._bad:
            raise OSError("the file is damaged")
        return torch.randn(8), torch.tensor(index % 3)


def main() -> None:
    kind, device, step = sys.argv[1], int(sys.argv[2]), int(sys.argv[3])
    rank = int(os.environ["RANK"])
    fault = Fault(kind, device, step)
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, 32), nn.Tanh(), nn.Linear(32, 3))
    if kind == "disagree" and rank == device:
        model = nn.Sequential(nn.Linear(8, 33), nn.Tanh(), nn.Linear(33, 3))

    def loss(model: nn.Module, batch: tuple[torch.Tensor, torch.Tensor]) -> torch.Tensor:
        if kind == "inside" and rank == device and trainer_step[0] == step:
            raise ArithmeticError("the fault that was asked for")
        value = nn.functional.cross_entropy(model(batch[0]), batch[1], reduction="none")
        if kind == "nan" and rank == device and trainer_step[0] == step:
            value = value * float("nan")
        return value

    trainer_step = [0]
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    trainer = onefold.Trainer(model, optimizer, loss, shards=4)
    data = Samples(bad=step if kind == "sample" else -1)
    batches = trainer.loader(data, batch_size=16, workers=1)
    print("ready", flush=True)
    steps = 0
    for _ in trainer.epochs(100_000):
        for batch in batches:
            steps += 1
            trainer_step[0] = steps
            fault.strike(rank, steps)
            trainer.step(batch)
            if kind == "none" and steps == step:
                print(trainer.fingerprint(), flush=True)
                return


main()
