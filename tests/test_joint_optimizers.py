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
from onefold.core.options import RunOptions
from onefold.core.world import World
from tests.small import Batch, bits, points
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


WAYS = [muon_and_adamw, sgd_and_adam]
KINDS = ["list", "tuple", "dict", "dict of one loss"]


def trainer_of(
    make: Any = muon_and_adamw, kind: str = "list", *, devices: int = 1, **choices: Any
) -> onefold.Trainer:
    model = model_of()
    given: Any = make(model)
    schedule: Any = schedules_of(given) if choices.pop("scheduled", False) else None
    losses: Any = {"left": loss} if kind == "dict of one loss" else loss
    if kind == "tuple":
        given, schedule = tuple(given), schedule and tuple(schedule)
    elif kind.startswith("dict"):
        names = "left", "right"
        given = dict(zip(names, given, strict=True))
        schedule = schedule and dict(zip(names, schedule, strict=True))
    choices = {"shards": 4, "threads": 1, "devices": ["cpu"] * devices, **choices}
    if devices == 1:
        del choices["devices"]
    return onefold.Trainer(model, given, losses, schedule=schedule, **choices)


def train(trainer: onefold.Trainer, first: int = 1, last: int = STEPS) -> onefold.Trainer:
    for number in range(first, last + 1):
        inputs, targets = points(12, INPUTS)
        trainer.step((inputs * number, targets))
    return trainer


@for_each("kind", KINDS)
@for_each("make", WAYS)
def test_one_shard_has_the_bits_of_a_plain_loop(make: Any, kind: str) -> None:
    torch.set_num_threads(1)
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
    trainer = train(trainer_of(make, kind, shards=1, clip_norm=0.5, scheduled=True))
    assert bits(trainer.model) == bits(model)


@for_each("precision", [None, "fp16", "bf16-params"])
@for_each("make", WAYS)
def test_bits_do_not_depend_on_devices(make: Any, precision: Any) -> None:
    found = set()
    for devices in (1, 2, 3):
        trainer = trainer_of(make, devices=devices, precision=precision, clip_norm=0.5)
        trainer.average(decay=0.9)
        train(trainer)
        with trainer.averaged():
            averaged = trainer.fingerprint()
        found.add((trainer.fingerprint(), averaged))
    assert len(found) == 1


@for_each("kind", ["list", "dict"])
@for_each("make", WAYS)
def test_a_stopped_run_goes_on_with_other_devices(make: Any, kind: str, tmp_path: Path) -> None:
    whole = train(trainer_of(make, kind, scheduled=True), 1, 4)
    train(trainer_of(make, kind, devices=2, scheduled=True), 1, 2).save(tmp_path)
    going_on = trainer_of(make, kind, devices=3, scheduled=True)
    going_on.load(tmp_path)
    assert train(going_on, 3, 4).fingerprint() == whole.fingerprint()


@for_each("keep", ["host", "stages"])
@for_each("make", WAYS)
def test_what_devices_keep_is_no_matter(
    make: Any, keep: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    expected = train(trainer_of(make)).fingerprint()
    world = World(options=RunOptions(keep=keep))
    monkeypatch.setattr("onefold.trainer.current_world", lambda: world)
    trainer = trainer_of(make, devices=2)
    assert train(trainer).fingerprint() == expected
    trainer.close()


def test_a_schedule_may_be_missing_in_a_list() -> None:
    model = model_of()
    optimizers = sgd_and_adam(model)
    schedule = [None, ExponentialLR(optimizers[1], 0.5)]
    trainer = onefold.Trainer(model, optimizers, loss, shards=1, threads=1, schedule=schedule)
    train(trainer, 1, 2)
    assert [each.param_groups[0]["lr"] for each in optimizers] == [0.1, 0.0025]


@for_each(
    ("change", "message"),
    [
        (lambda m, o, s: ([], loss, None), "at least one optimizer, got an empty list"),
        (lambda m, o, s: (o, loss, s[:1]), "one for each or None, got 1 sched"),
        (lambda m, o, s: (o[0], loss, s), "expected a list of schedules beside a list of opt"),
        (lambda m, o, s: (o, loss, s[0]), "or a list beside a list"),
        (lambda m, o, s: (o, loss, s[::-1]), "was made for another optimizer"),
        (lambda m, o, s: (o, {"a": loss, "b": loss}, None), "or one loss that all of them upd"),
        (lambda m, o, s: ([*o, o[0]], loss, None), "in the optimizers '0' and '2': expected it in"),
        (lambda m, o, s: ([o[0], loss], loss, None), r"expected optimizer\['1'\] to be a torch"),
    ],
)
def test_what_does_not_fit_is_refused(change: Any, message: str) -> None:
    model = model_of()
    optimizers = sgd_and_adam(model)
    given, losses, schedule = change(model, optimizers, schedules_of(optimizers))
    with pytest.raises((TypeError, ValueError), match=message):
        onefold.Trainer(model, given, losses, shards=1, threads=1, schedule=schedule)
