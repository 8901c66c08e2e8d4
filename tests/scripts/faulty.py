"""Trains a small model, and lets one device come to grief: ``faulty.py KIND DEVICE STEP``.

With ``none`` it ends after the step; ``inside`` raises in the loss, and the others before a step.
"""

import os
import signal
import sys
import time

import torch
from torch import nn

import onefold
from onefold.launcher.environment import current_context


def strike(kind: str) -> None:
    if kind in ("kill", "stop"):
        os.kill(os.getpid(), signal.SIGKILL if kind == "kill" else signal.SIGSTOP)
    if kind == "sleep":
        time.sleep(600)
    if kind in ("raise", "inside"):
        raise ArithmeticError("the fault that was asked for")
    if kind in ("leave", "exit"):
        sys.exit(0 if kind == "leave" else 3)


def main() -> None:
    kind, device, step = sys.argv[1], int(sys.argv[2]), int(sys.argv[3])
    rank = current_context().rank
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, 32), nn.Tanh(), nn.Linear(32, 3))

    def loss(model: nn.Module, batch: tuple[torch.Tensor, torch.Tensor]) -> torch.Tensor:
        if kind == "inside" and (rank, trainer.steps + 1) == (device, step):
            strike(kind)
        return nn.functional.cross_entropy(model(batch[0]), batch[1], reduction="none")

    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    trainer = onefold.Trainer(model, optimizer, loss, shards=4)
    data = torch.utils.data.TensorDataset(torch.randn(64, 8), torch.arange(64) % 3)
    batches = trainer.loader(data, batch_size=16, workers=1)
    print("ready", flush=True)
    for _ in trainer.epochs(100_000):
        for batch in batches:
            if kind != "inside" and (rank, trainer.steps + 1) == (device, step):
                strike(kind)
            trainer.step(batch)
            if kind == "none" and trainer.steps == step:
                print(trainer.fingerprint(), flush=True)
                return


main()
