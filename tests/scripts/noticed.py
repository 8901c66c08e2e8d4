"""Saves itself when it is asked to stop: ``noticed.py FOLDER SECONDS LAST``.

Each step takes so long. Each process writes its id to FOLDER at the start, and then the step after
which it stopped; the lead prints the fingerprint after the last step.
"""

import os
import sys
import time
from pathlib import Path

import torch
from torch import nn

import onefold
from onefold.launcher.environment import current_context


def main() -> None:
    folder, seconds, last = Path(sys.argv[1]), float(sys.argv[2]), int(sys.argv[3])
    rank = str(current_context().rank)
    torch.manual_seed(0)
    model = nn.Linear(8, 1)
    optimizer = torch.optim.Adam(model.parameters(), lr=0.01)

    def loss(model: nn.Module, batch: torch.Tensor) -> torch.Tensor:
        return model(batch).square().mean(dim=1)

    trainer = onefold.Trainer(model, optimizer, loss, shards=4, threads=1)
    loader = trainer.loader(torch.randn(40, 8), batch_size=8, shuffle=True)
    trainer.load(folder / "run", if_any=True)
    (folder / f"pid-{rank}").write_text(str(os.getpid()))
    for _ in trainer.epochs(100):
        for batch in loader:
            trainer.step(batch)
            time.sleep(seconds)
            if trainer.asked_to_stop:
                trainer.save(folder / "run", wait=True)
                (folder / f"stopped-{rank}").write_text(str(trainer.steps))
                sys.exit(75)
            if trainer.steps == last:
                if trainer.is_lead:
                    (folder / "bits").write_text(trainer.fingerprint())
                return


main()
