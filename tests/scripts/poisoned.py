"""Trains under ``onefold run --checkpoint``, and something goes wrong.

``poisoned.py KIND FOLDER TIMES``, where KIND is one of these:

``update``: loss and gradient of step 6 are finite and what the optimizer makes of them is not, so
many times. ``survived``: the loss of step 4 is not finite, and the script goes on with the next
batch. ``closed``: the script handles an exception of its own after step 4, closes its trainer there
and ends well. ``handled``: likewise, with the loss of step 5.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path

import torch
from torch import nn

import onefold
from onefold.errors import LossError

LAST = 8


class Poisoning(torch.optim.SGD):
    """Spoils the weight when it is told to."""

    spoil: Callable[[], bool]

    def step(self, closure: object = None) -> None:
        super().step()
        for weight in self.param_groups[0]["params"]:
            if weight.numel() > 1 and self.spoil():
                weight.data.fill_(float("nan"))


def main() -> None:
    kind, folder, times = sys.argv[1], Path(sys.argv[2]), int(sys.argv[3])
    torch.manual_seed(0)
    model = nn.Linear(8, 1)
    before = len(list(folder.iterdir()))

    def loss(model: nn.Module, batch: tuple[torch.Tensor, ...]) -> torch.Tensor:
        losses: torch.Tensor = model(batch[0]).square().mean(dim=1)
        step = trainer.steps + 1
        if (kind, step) in (("survived", 4), ("handled", 5)) and not list(folder.iterdir()):
            (folder / "once").touch()
            losses = losses * float("nan")
        return losses

    def spoil() -> bool:
        if kind != "update" or trainer.steps + 1 != 6 or before >= times:
            return False
        (folder / str(before)).touch()
        return True

    optimizer = Poisoning(model.parameters(), lr=0.01)
    optimizer.spoil = spoil
    trainer = onefold.Trainer(model, optimizer, loss, shards=4)
    data = torch.utils.data.TensorDataset(torch.randn(LAST * 8, 8))
    try:
        for batch in trainer.loader(data, batch_size=8):
            try:
                trainer.step(batch)
            except LossError:
                if kind == "handled":
                    raise
            if kind == "closed" and trainer.steps == 4:
                raise KeyError("enough")
    except (KeyError, LossError):
        trainer.close()
    print(f"end {trainer.steps} {trainer.fingerprint()}", flush=True)


main()
