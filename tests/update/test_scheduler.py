"""Schedulers of learning rates: they step with updates, and go on where they were."""

import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.optim import lr_scheduler as lrs

from onefold.update.scheduler import check_scheduler
from tests.small import line, make_trainer, points, sgd
from tests.tables import for_each

Make = Callable[[torch.optim.Optimizer], lrs.LRScheduler]

SCHEDULES: dict[str, Make] = {
    "step": lambda o: lrs.StepLR(o, 3),
    "milestones": lambda o: lrs.MultiStepLR(o, [2, 5]),
    "cosine": lambda o: lrs.CosineAnnealingLR(o, 12),
    "restarts": lambda o: lrs.CosineAnnealingWarmRestarts(o, 4),
    "one cycle": lambda o: lrs.OneCycleLR(o, 0.3, total_steps=12),
    "lambda": lambda o: lrs.LambdaLR(o, lambda step: 0.9**step),
    "cyclic": lambda o: lrs.CyclicLR(o, 0.01, 0.1, step_size_up=3),
    "sequence": lambda o: lrs.SequentialLR(
        o, [lrs.LinearLR(o, total_iters=3), lrs.CosineAnnealingLR(o, 9)], [3]
    ),
    "chained": lambda o: lrs.ChainedScheduler([lrs.ConstantLR(o), lrs.ExponentialLR(o, 0.9)]),
}


def trained(
    make: Make, steps: int, devices: int, load: Path | None = None, save: Path | None = None
) -> list[object]:
    """Learning rates and the final bits; from one folder and into another one."""
    optimizer = sgd(model := line())
    scheduler = make(optimizer)
    trainer = make_trainer(model, optimizer=optimizer, devices=devices, scheduler=scheduler)
    seen: list[object] = []
    if load is not None:
        trainer.load(load)
    while trainer.steps < steps:
        trainer.step(points(8))
        seen.append(optimizer.param_groups[0]["lr"])
    if save is not None:
        trainer.save(save)
    return [*seen, trainer.fingerprint()]


@for_each("name", SCHEDULES)
def test_a_scheduler_goes_on_where_it_was(tmp_path: Path, name: str) -> None:
    make = SCHEDULES[name]
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "The epoch parameter|Detected call of")
        whole = trained(make, 10, 1)
        first = trained(make, 5, 3, save=tmp_path)
        assert first[:-1] == whole[:5]
        assert trained(make, 10, 2, load=tmp_path) == whole[5:]


def strange(optimizer: torch.optim.Optimizer) -> Any:
    scheduler = lrs.StepLR(optimizer, 1)
    scheduler.helper = print  # type: ignore[attr-defined]
    return scheduler


@for_each(
    ("make", "words"),
    [
        (lambda o: 3, r"scheduler must be .* but got int"),
        (lrs.ReduceLROnPlateau, "ReduceLROnPlateau needs a metric"),
        (lambda o: lrs.StepLR(sgd(line()), 1), "StepLR belongs to another optimizer"),
        (strange, r"the state of StepLR\['helper'\] is of type builtin"),
    ],
)
def test_what_cannot_be_stepped_or_saved_is_refused(make: Callable[..., Any], words: str) -> None:
    optimizer = sgd(line())
    with pytest.raises((TypeError, ValueError), match=words):
        check_scheduler(make(optimizer), optimizer)
