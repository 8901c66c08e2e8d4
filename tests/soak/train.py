"""What is run: a small model, some epochs, a few seconds; prints its fingerprint at the end.

The lead writes a byte to the file SOAK_BEGUN before each step. In SOAK_FAULT stands ``KIND STEP
DEVICE`` where the script itself fails.
"""

import os
import time

import torch
from torch import nn

import onefold
from onefold.launcher.environment import current_context

EPOCHS, STEPS_OF_EPOCH, BATCH = 4, 6, 24
PAUSE_S = 0.04


class Augmented(torch.utils.data.Dataset[tuple[torch.Tensor, torch.Tensor]]):
    """Samples that are augmented."""

    def __len__(self) -> int:
        return STEPS_OF_EPOCH * BATCH - 5

    def __getitem__(self, index: int) -> tuple[torch.Tensor, torch.Tensor]:
        inputs = torch.linspace(-1, 1, 16) * (index + 1) / len(self)
        return inputs + 0.1 * torch.randn(16), torch.tensor(index % 3)


def fail(kind: str, parameters: list[nn.Parameter]) -> None:
    """Do what a script may do wrong."""
    if kind == "raises":
        raise LookupError("of the script")
    if kind == "exits":
        os._exit(3)
    if kind == "leaves":
        raise SystemExit("the script has had enough")
    if kind == "waits":
        time.sleep(10_000)
    if kind == "poisons":
        parameters[0].register_hook(lambda grad: grad * float("nan"))


def main() -> None:
    kind, at, device = (os.environ.get("SOAK_FAULT") or "none -1 -1").split()
    mine = str(current_context().rank) == device
    torch.manual_seed(0)
    model = nn.Sequential(
        nn.Linear(16, 300), nn.BatchNorm1d(300), nn.Dropout(0.2), nn.Linear(300, 3)
    )
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, 40)

    def loss(model: nn.Module, batch: tuple[torch.Tensor, torch.Tensor]) -> torch.Tensor:
        inputs, labels = batch
        return nn.functional.cross_entropy(model(inputs), labels, reduction="none")

    trainer = onefold.Trainer(model, optimizer, loss, shards=4, seed=5, scheduler=scheduler)
    workers = int(os.environ.get("SOAK_WORKERS", "0"))
    batches = trainer.loader(Augmented(), batch_size=BATCH, shuffle=True, workers=workers)
    for _ in trainer.epochs(EPOCHS):
        for batch in batches:
            if trainer.steps == int(at) and (mine or kind == "poisons"):
                fail(kind, list(model.parameters()))
            if trainer.is_lead:
                with open(os.environ["SOAK_BEGUN"], "ab") as file:
                    file.write(b".")
            trainer.step(batch)
            time.sleep(PAUSE_S)
    print(f"end {trainer.steps} {trainer.fingerprint()}", flush=True)


if __name__ == "__main__":
    main()
