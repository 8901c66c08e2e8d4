"""A run in parts, each on other devices. Also called in launched processes."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import torch

import onefold
from onefold.models import resnet18
from tests.bits.cases import Images, loss

EPOCHS = 3
BATCH = 12
STEPS_OF_AN_EPOCH = 3


@dataclass(frozen=True)
class Case:
    """What the bits may depend on, and how the samples are read."""

    seed: int
    drop_last: bool
    workers: int


def run_part(
    case: Case, folder: Path, stop_after: int | None, devices: Sequence[str] | None = None
) -> tuple[int, str]:
    """Go on from a folder if there is something in it, and stop after a step or at the end.

    Args:
        case: what to train.
        folder: of the checkpoints.
        stop_after: this step the run is saved; None for going on to the end.
        devices: for this process to drive; None in a launched process.
    """
    torch.manual_seed(case.seed)
    model = resnet18(in_channels=1)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    trainer = onefold.Trainer(
        model,
        optimizer,
        loss,
        shards=4,
        seed=case.seed,
        devices=devices,
        threads=1,
        schedule=torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, EPOCHS * STEPS_OF_AN_EPOCH),
        clip_norm=1.0,
    )
    batches = trainer.loader(
        Images(),
        batch_size=BATCH,
        shuffle=True,
        workers=case.workers,
        drop_last=case.drop_last,
    )
    if case.seed == 1:
        trainer.average(decay=0.9)
    if folder.is_dir():
        trainer.load(folder)
    for _ in trainer.epochs(EPOCHS):
        for batch in batches:
            step = trainer.step(batch)
            if step.number == stop_after:
                trainer.save(folder, wait=bool(case.seed % 2))
                result = step.number, trainer.fingerprint()
                trainer.close()
                return result
    result = trainer.steps, trainer.fingerprint()
    if case.seed == 1:
        with trainer.averaged():
            result = trainer.steps, trainer.fingerprint() + result[1]
    trainer.close()
    return result
