"""Several Trainers of one model, one after the other; called on each device of a run."""

from __future__ import annotations

import hashlib
from collections.abc import Callable

import torch
from torch import nn
from torch.nn.utils import prune

import onefold
from tests.small import bits, line, make_trainer, points

ROUNDS = 3


def _model() -> nn.Module:
    """Tied weights, a batch norm, channels_last, and a part that is frozen."""
    torch.manual_seed(0)
    model = nn.Sequential(
        nn.Unflatten(1, (3, 1, 1)),
        nn.Conv2d(3, 4, 1).to(memory_format=torch.channels_last),
        nn.BatchNorm2d(4),
        nn.Flatten(),
        tied := nn.Linear(4, 4, bias=False),
        nn.ReLU(),
        tied,
        nn.Linear(4, 4),
        nn.Linear(4, 2),
    )
    model[7].requires_grad_(False)
    return model


def _trained(model: nn.Module, devices: int | None, seed: int = 0) -> onefold.Trainer:
    trainer = make_trainer(model, devices=devices, seed=seed)
    for number in range(2):
        inputs, targets = points(8)
        trainer.step((inputs + seed + number / 4, targets))
    return trainer


def _pruned(model: nn.Module, devices: int | None, ends: str) -> None:
    for seed in range(ROUNDS):
        trainer = _trained(model, devices, seed)
        _end(trainer, ends)
        del trainer
        prune.l1_unstructured(model[8], "weight", amount=0.3)
        prune.remove(model[8], "weight")
        with torch.no_grad():
            model[4].weight.mul_(0.5)
            model[7].weight.add_(1)
            model[2].running_var.mul_(2)


def _folds(model: nn.Module, devices: int | None, ends: str) -> None:
    start = {name: value.clone() for name, value in model.state_dict().items()}
    soup = {name: torch.zeros_like(value) for name, value in start.items()}
    for seed in range(ROUNDS):
        model.load_state_dict(start)
        trainer = _trained(model, devices, seed)
        _end(trainer, ends)
        del trainer
        for name, value in model.state_dict().items():
            soup[name] += value // ROUNDS if name.endswith("tracked") else value / ROUNDS
    model.load_state_dict(soup)


def _new_head(model: nn.Module, devices: int | None, ends: str) -> None:
    seen = model.state_dict()
    for seed in range(ROUNDS):
        trainer = _trained(model, devices, seed)
        seen = model.state_dict()  # of the same memory, as everywhere in PyTorch
        _end(trainer, ends)
        del trainer
        model[8].reset_parameters()
        model[4] = model[6] = nn.Linear(4, 4, bias=False)
        model[1].weight.data.clamp_(-0.1, 0.1)
        seen["1.bias"].mul_(0.5)
    assert torch.equal(seen["1.bias"], model[1].bias)


def _end(trainer: onefold.Trainer, how: str) -> None:
    if how == "close":
        trainer.close()


WAYS: dict[str, Callable[[nn.Module, int | None, str], None]] = {
    "pruning": _pruned,
    "folds": _folds,
    "new head": _new_head,
}
ENDS = ("close", "drop")


def run(name: str, ends: str, devices: int | None = None) -> str:
    """One of the ways; returns the bits that this process ends with."""
    model = _model()
    WAYS[name](model, devices, ends)
    trainer = _trained(model, devices)
    trainer.close()
    with torch.no_grad():
        model[8].weight.mul_(3)
    values = [tensor.contiguous().numpy().tobytes() for tensor in model.state_dict().values()]
    return hashlib.sha256(b"".join(values)).hexdigest()


def run_all() -> dict[tuple[str, str], list[str]]:
    """All of them, and what every process ends with."""
    return {(name, ends): _everywhere(run(name, ends)) for name in WAYS for ends in ENDS}


def _everywhere(text: str) -> list[str]:
    trainer = make_trainer(line(), devices=None)
    found = [str(each) for each in trainer.gather(text)]
    trainer.close()
    return found


def written(where: str, how: str, name: str) -> str:
    """Write to a model on one device or on all, with or without close; return what is refused."""
    model = nn.Sequential(nn.BatchNorm1d(3), line())
    trainer = _trained(model, None)
    if how == "close":
        trainer.close()
    target = model.get_parameter(name) if "weight" in name else model.get_buffer(name)
    if where == "everywhere" or trainer.is_lead == (where == "lead"):
        with torch.no_grad():
            target.mul_(0.5)
    try:
        _trained(model, None)
    except onefold.errors.DisagreementError as error:
        return str(error)
    return ""


def left_alone(how: str) -> str:
    """A Trainer whose model another one has taken, or that is closed, is of no more use."""
    model = line()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    trainer = make_trainer(model, optimizer=optimizer)
    trainer.step(points(8))
    if how == "close":
        trainer.close()
    else:
        make_trainer(nn.Sequential(model, nn.Linear(1, 1)))
    found = [trainer.fingerprint()[:0], str(len(optimizer.state))]
    for call in (lambda: trainer.step(points(8)), optimizer.step):
        try:
            call()
        except RuntimeError as error:
            found.append(str(error))
    assert bits(model)
    return "; ".join(found)
