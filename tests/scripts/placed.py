"""One process of several that somebody else has started: ``placed.py KIND``.

``main``: trains at once, as under srun or in a pod. ``ray``: in a group that is formed already, and
in a thread, as Ray Train runs its workers.
"""

import sys
import threading

import torch
import torch.distributed as dist
from torch import nn

import onefold


def train() -> str:
    """Train, and return the fingerprint."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, 1))
    optimizer = torch.optim.Adam(model.parameters(), lr=0.01)

    def loss(model: nn.Module, batch: torch.Tensor) -> torch.Tensor:
        return model(batch).square().mean(dim=1)

    trainer = onefold.Trainer(model, optimizer, loss, shards=4, threads=1)
    loader = trainer.loader(torch.randn(20, 8), batch_size=8, shuffle=True)
    for _ in trainer.epochs(2):
        for batch in loader:
            trainer.step(batch)
    scores = trainer.evaluate(lambda m, b: {"loss": loss(m, b)}, torch.ones(7, 8), batch_size=4)
    bits = trainer.fingerprint()
    print(len(trainer.devices), bits, scores["loss"], flush=True)
    trainer.close()
    return bits


if __name__ == "__main__":
    if sys.argv[1] == "ray":
        dist.init_process_group("gloo")
        worker = threading.Thread(target=train)
        worker.start()
        worker.join()
        dist.destroy_process_group()
    else:
        train()
