"""Trains under ``onefold run --checkpoint`` and goes wrong: ``poisoned.py FOLDER TIMES``.

Loss and gradient of step 6 are finite and what the optimizer makes of them is not, so many times;
the folder has a file for each.
"""

import sys
from pathlib import Path

import torch
from torch import nn

import onefold

LAST = 8


def main() -> None:
    folder, times = Path(sys.argv[1]), int(sys.argv[2])
    torch.manual_seed(0)
    model = nn.Linear(8, 1)
    before = len(list(folder.iterdir()))

    class Poisoning(torch.optim.SGD):
        def step(self, closure: object = None) -> None:
            super().step()
            if trainer.steps + 1 == 6 and before < times:
                (folder / str(before)).touch()
                model.weight.data.fill_(float("nan"))

    def loss(model: nn.Module, batch: tuple[torch.Tensor, ...]) -> torch.Tensor:
        return model(batch[0]).square().mean(dim=1)

    trainer = onefold.Trainer(model, Poisoning(model.parameters(), lr=0.01), loss, shards=4)
    data = torch.utils.data.TensorDataset(torch.randn(LAST * 8, 8))
    for batch in trainer.loader(data, batch_size=8):
        trainer.step(batch)
    print(f"end {trainer.steps} {trainer.fingerprint()}", flush=True)


main()
