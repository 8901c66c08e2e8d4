"""Trains a small model under ``onefold run --checkpoint``: ``stopped.py KIND [ARGUMENT ...]``.

``steps SECONDS LAST``: each step takes so long. ``workers SECONDS LAST``: likewise, with a loader
worker. ``crash FOLDER TIMES CHECKPOINTS``: device 0 is killed in step 7 so many times, once a
checkpoint is there.
"""

import os
import signal
import sys
import time
from pathlib import Path

import torch
from torch import nn

import onefold

STEPS_OF_AN_EPOCH = 5


def trainer_of() -> onefold.Trainer:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, 32), nn.Tanh(), nn.Linear(32, 1))
    optimizer = torch.optim.Adam(model.parameters(), lr=0.01)

    def loss(model: nn.Module, batch: tuple[torch.Tensor, ...]) -> torch.Tensor:
        return model(batch[0]).square().mean(dim=1)

    return onefold.Trainer(model, optimizer, loss, shards=4)


def crash(folder: Path, times: int, checkpoints: Path) -> None:
    """Be killed once a checkpoint is there, unless that has happened often enough."""
    before = len(list(folder.iterdir()))
    if before < times:
        while not list(checkpoints.glob("step-*")):
            time.sleep(0.01)
        (folder / str(before)).touch()
        os.kill(os.getpid(), signal.SIGKILL)


def main() -> None:
    kind, arguments = sys.argv[1], sys.argv[2:]
    trainer = trainer_of()
    generator = torch.Generator().manual_seed(1)
    inputs = torch.randn(40, 8, generator=generator)
    data = torch.utils.data.TensorDataset(inputs)
    workers = int(kind == "workers")
    train = trainer.loader(data, batch_size=40 // STEPS_OF_AN_EPOCH, shuffle=True, workers=workers)
    kind = "steps" if workers else kind
    print("ready", flush=True)
    for _ in trainer.epochs(3 if kind != "steps" else 100):
        for batch in train:
            step = trainer.step(batch)
            if kind == "steps":
                time.sleep(float(arguments[0]))
            if kind == "crash" and trainer.is_lead and step.number == 7:
                crash(Path(arguments[0]), int(arguments[1]), Path(arguments[2]))
            if kind == "steps" and step.number == int(arguments[1]):
                print(trainer.fingerprint(), flush=True)
                return
    print(trainer.fingerprint(), flush=True)


main()
