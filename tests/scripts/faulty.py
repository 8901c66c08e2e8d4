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


def main() -> None:
    kind, device, step = sys.argv[1], int(sys.argv[2]), int(sys.argv[3])
    rank = int(os.environ["RANK"])
    fault = Fault(kind, device, step)
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, 32), nn.Tanh(), nn.Linear(32, 3))

    def loss(model: nn.Module, batch: tuple[torch.Tensor, torch.Tensor]) -> torch.Tensor:
        if kind == "inside" and rank == device and trainer_step[0] == step:
            raise ArithmeticError("the fault that was asked for")
        return nn.functional.cross_entropy(model(batch[0]), batch[1], reduction="none")

    trainer_step = [0]
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    trainer = onefold.Trainer(model, optimizer, loss, shards=4)
    data = torch.utils.data.TensorDataset(torch.randn(64, 8), torch.arange(64) % 3)
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
