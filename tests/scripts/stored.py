"""Trains and prints the fingerprint; it knows nothing of checkpoints.

STEPS is the number of steps, PAUSE_S the time between two. After step FULL_AFTER, no file may grow.
"""

import os
import resource
import time

import torch

import onefold


def loss(model: torch.nn.Module, batch: torch.Tensor) -> torch.Tensor:
    return model(batch).square().mean(dim=1)


steps = int(os.environ.get("STEPS", "60"))
torch.manual_seed(0)
model = torch.nn.Sequential(
    torch.nn.Linear(4, 20_000), torch.nn.Dropout(0.2), torch.nn.Linear(20_000, 1)
)
optimizer = torch.optim.Adam(model.parameters(), lr=0.001)
trainer = onefold.Trainer(model, optimizer, loss, shards=2, seed=0, threads=1)
loader = trainer.loader(torch.randn(80, 4), batch_size=4, shuffle=True)
for _ in trainer.epochs(steps // 20):
    for batch in loader:
        trainer.step(batch)
        if not trainer.replaying:
            time.sleep(float(os.environ.get("PAUSE_S", "0")))
            if trainer.steps == int(os.environ.get("FULL_AFTER", "-1")):
                resource.setrlimit(resource.RLIMIT_FSIZE, (200_000, resource.RLIM_INFINITY))
print("end", trainer.fingerprint(), flush=True)
