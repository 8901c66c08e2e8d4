"""Updates by itself under ``onefold run --checkpoint``: ``by_script.py KIND SECONDS LAST``.

``inside``: the gradient is asked for in the block of changes. ``outside``: before it. ``none``: as
inside, of a Trainer without an optimizer. Each step takes so long; after the last one the script
ends.
"""

from __future__ import annotations

import sys
import time

import torch
from torch import nn

import onefold


def main() -> None:
    kind, seconds, last = sys.argv[1], float(sys.argv[2]), int(sys.argv[3])
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, 32), nn.Dropout(0.1), nn.Tanh(), nn.Linear(32, 1))
    optimizer = None if kind == "none" else torch.optim.SGD(model.parameters(), lr=0.01)

    def loss(model: nn.Module, batch: tuple[torch.Tensor, ...]) -> torch.Tensor:
        return model(batch[0]).square().mean(dim=1)

    def update(pace: float) -> None:
        with torch.no_grad():
            for parameter in model.parameters():
                parameter -= pace * parameter.grad

    trainer = onefold.Trainer(model, optimizer, loss, shards=4)
    inputs = torch.randn(40, 8, generator=torch.Generator().manual_seed(1))
    batches = trainer.loader(torch.utils.data.TensorDataset(inputs), batch_size=8, shuffle=True)
    print("ready", flush=True)
    for _ in trainer.epochs(100):
        for batch in batches:
            if kind == "outside":
                trainer.gradient(batch)
            with trainer.changing():
                if kind != "outside":
                    trainer.gradient(batch)
                    update(0.05)
                    trainer.gradient(batch)
                update(0.1)
            time.sleep(seconds)
            if trainer.steps == last:
                print(trainer.fingerprint(), flush=True)
                return


main()
