"""Changes of the model between steps, in `trainer.changing`; called on each device of a run."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import nn
from torch.utils.data import TensorDataset

import onefold
from tests.inside import engine_in
from tests.small import line, make_trainer, points, square

Result = tuple[str, float]


def _trainer(devices: int | None) -> onefold.Trainer:
    model = nn.Sequential(nn.BatchNorm1d(3), line())
    trainer = make_trainer(model, devices=devices)
    trainer.step(points(8))
    return trainer


def _score(trainer: onefold.Trainer) -> float:
    data = TensorDataset(*points(12))
    return trainer.evaluate(lambda m, b: {"loss": square(m, b)}, data, batch_size=5)["loss"]


def average_swapped_in(trainer: onefold.Trainer, lead_alone: bool) -> float:
    """An average in, evaluate, the original back: on every device, or on the lead alone."""
    parameters = list(trainer.model.parameters())
    saved: list[torch.Tensor] = []
    with trainer.changing():
        if trainer.is_lead or not lead_alone:
            saved = [p.detach().clone() for p in parameters]
            for parameter in parameters:
                parameter.data.copy_(parameter.data * 0.5)
    score = _score(trainer)
    with trainer.changing():
        for parameter, value in zip(parameters, saved, strict=False):
            parameter.data.copy_(value)
    return score


def scaled(trainer: onefold.Trainer, lead_alone: bool) -> float:
    """Once, whoever does it."""
    with trainer.changing(), torch.no_grad():
        if trainer.is_lead or not lead_alone:
            for parameter in trainer.model.parameters():
                parameter.mul_(0.5)
    return _score(trainer)


def slower(trainer: onefold.Trainer, lead_alone: bool) -> float:
    with trainer.changing():
        if trainer.is_lead or not lead_alone:
            group = optimizer_of(trainer).param_groups[0]
            group["lr"], group["momentum"] = 0.01, 0.5
    return _score(trainer)


def statistics_reset(trainer: onefold.Trainer, lead_alone: bool) -> float:
    with trainer.changing():
        if trainer.is_lead or not lead_alone:
            trainer.model[0].reset_running_stats()
    return _score(trainer)


def optimizer_of(trainer: onefold.Trainer) -> torch.optim.Optimizer:
    return engine_in(trainer).update.optimizer


CHANGES: dict[str, Callable[[onefold.Trainer, bool], float]] = {
    "average": average_swapped_in,
    "scaled": scaled,
    "slower": slower,
    "statistics": statistics_reset,
}


def run(name: str, lead_alone: bool, devices: int | None) -> Result:
    trainer = _trainer(devices)
    score = CHANGES[name](trainer, lead_alone)
    trainer.barrier()
    for _ in range(2):
        trainer.step(points(8))
    result = trainer.fingerprint(), score
    trainer.close()
    return result


def run_all() -> dict[tuple[str, bool], Result]:
    return {(name, alone): run(name, alone, None) for name in CHANGES for alone in (True, False)}
