"""Several optimizers for one loss, such as Muon beside AdamW: all of them update in each step."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn.utils import clip_grad_norm_
from torch.optim import Optimizer
from torch.optim.lr_scheduler import ExponentialLR, LRScheduler, StepLR

import onefold
from tests.small import Batch, bits, make_trainer, points
from tests.tables import for_each

INPUTS, STEPS = 130, 4


def model_of() -> nn.Sequential:
    torch.manual_seed(5)
    return nn.Sequential(nn.Linear(INPUTS, 140), nn.Tanh(), nn.Linear(140, 1))


def loss(model: nn.Module, batch: Batch) -> torch.Tensor:
    inputs, targets = batch
    return (model(inputs) - targets).square().mean()


def muon_and_adamw(model: nn.Module) -> list[Optimizer]:
    flat = [p for p in model.parameters() if p.dim() == 1]
    matrices = [p for p in model.parameters() if p.dim() == 2]
    return [torch.optim.Muon(matrices, lr=0.02), torch.optim.AdamW(flat, lr=0.01)]


def sgd_and_adam(model: nn.Module) -> list[Optimizer]:
    """Both by element, so that parameters are cut."""
    first, *others = model.parameters()
    return [torch.optim.SGD([first], lr=0.1, momentum=0.9), torch.optim.Adam(others, lr=0.01)]


def schedules_of(optimizers: Sequence[Optimizer]) -> list[LRScheduler]:
    return [StepLR(optimizers[0], 2, gamma=0.5), ExponentialLR(optimizers[1], 0.9)]


def trainer_of(make: Any, kind: Any = list, **choices: Any) -> Any:
    given = make(model := model_of())
    both = [kind(given), kind(schedules_of(given))]
    losses: Any = {"left": loss} if kind is left_and_right else loss
    choices = {"optimizer": both[0], "schedule": both[1], "clip_norm": 0.5, **choices}
    return make_trainer(model, losses, **choices)


def left_and_right(two: Sequence[Any]) -> dict[str, Any]:
    return dict(zip(("left", "right"), two, strict=True))


def train(trainer: Any, first: int = 1, last: int = STEPS) -> Any:
    for number in range(first, last + 1):
        inputs, targets = points(12, INPUTS)
        trainer.step((inputs * number, targets))
    return trainer


each_way = for_each("make", [muon_and_adamw, sgd_and_adam])


@each_way
@for_each("kind", [list, tuple, left_and_right])
def test_one_shard_has_the_bits_of_a_plain_loop(make: Any, kind: Any) -> None:
    model = model_of()
    optimizers = make(model)
    schedules = schedules_of(optimizers)
    for number in range(1, STEPS + 1):
        model.zero_grad()
        inputs, targets = points(12, INPUTS)
        loss(model, (inputs * number, targets)).backward()
        clip_grad_norm_(model.parameters(), 0.5)
        for each in (*optimizers, *schedules):
            each.step()
    assert bits(train(trainer_of(make, kind, shards=1)).model) == bits(model)


@each_way
@for_each("precision", [None, "fp16", "bf16-params"])
def test_bits_do_not_depend_on_devices(make: Any, precision: Any, tmp_path: Path) -> None:
    one, two, three = (trainer_of(make, devices=n, precision=precision) for n in (1, 2, 3))
    for each in (one, two, three):
        each.average(decay=0.9)
    train(one)
    train(two, 1, 2).save(tmp_path)
    three.load(tmp_path)
    found = set()
    for each in (one, train(two, 3), train(three, 3)):
        with each.averaged():
            averaged = each.fingerprint()
        found.add((each.fingerprint(), averaged))
    assert len(found) == 1


@for_each(
    ("change", "message"),
    [
        (lambda o, s: ([], loss, None), "at least one optimizer, got an empty list"),
        (lambda o, s: (o, loss, s[:1]), "one for each or None, got 1 sched"),
        (lambda o, s: (o[0], loss, s), "expected a list of schedules beside a list of opt"),
        (lambda o, s: (o, loss, s[0]), "or a list beside a list"),
        (lambda o, s: (o, loss, s[::-1]), "was made for another optimizer"),
        (lambda o, s: (o, {"a": loss, "b": loss}, None), "or one loss that all of them upd"),
        (lambda o, s: ([*o, o[0]], loss, None), "in the optimizers '0' and '2': expected it in"),
        (lambda o, s: ([o[0], loss], loss, None), r"expected optimizer\['1'\] to be a torch"),
    ],
)
def test_what_does_not_fit_is_refused(change: Any, message: str) -> None:
    optimizers = sgd_and_adam(model := model_of())
    given, losses, schedule = change(optimizers, schedules_of(optimizers))
    with pytest.raises((TypeError, ValueError), match=message):
        onefold.Trainer(model, given, losses, shards=1, schedule=schedule)
