"""Several Trainers of one model, one after the other: what lies between them counts once."""

from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn.utils import prune

import onefold
from onefold.testing import simulate
from tests.small import bits, line, make_trainer, points
from tests.tables import for_each

Closes = Callable[[onefold.Trainer], None]
ROUNDS = 2


def model_of() -> nn.Sequential:
    """Tied weights, a batch norm, channels_last, and a part that is frozen."""
    torch.manual_seed(0)
    model = nn.Sequential(
        nn.Unflatten(1, (3, 1, 1)),
        nn.Conv2d(3, 4, 1).to(memory_format=torch.channels_last),  # type: ignore[call-overload]
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


def trained(model: nn.Module, devices: int | None, seed: int = 0) -> onefold.Trainer:
    trainer = make_trainer(model, devices=devices, seed=seed)
    for number in range(2):
        inputs, targets = points(8)
        trainer.step((inputs + seed + number / 4, targets))
    return trainer


def pruning(model: Any, devices: int | None, end: Closes) -> None:
    for seed in range(ROUNDS):
        end(trained(model, devices, seed))
        prune.l1_unstructured(model[8], "weight", amount=0.3)
        prune.remove(model[8], "weight")
        with torch.no_grad():
            model[4].weight.mul_(0.5)
            model[7].weight.add_(1)
            model[2].running_var.mul_(2)


def new_head(model: Any, devices: int | None, end: Closes) -> None:
    for seed in range(ROUNDS):
        trainer = trained(model, devices, seed)
        seen = model.state_dict()  # of the same memory, as everywhere in PyTorch
        end(trainer)
        del trainer
        model[8].reset_parameters()
        model[4] = model[6] = nn.Linear(4, 4, bias=False)
        model[1].weight.data.clamp_(-0.1, 0.1)
        seen["1.bias"].mul_(0.5)
    assert torch.equal(seen["1.bias"], model[1].bias)


def drop(trainer: onefold.Trainer) -> None:
    """Nothing: nobody closes it."""


WAYS = [(pruning, onefold.Trainer.close)]
"""Also for devices that keep parts: others look at a model whose Trainer is there."""
ALL_WAYS = [*WAYS, (new_head, onefold.Trainer.close), (pruning, drop)]


def run(ways: Any, devices: int | None = None) -> list[Any]:
    """The bits that this process ends with."""
    found = []
    for way, end in ways:
        model = model_of()
        way(model, devices, end)
        trained(model, devices).close()
        with torch.no_grad():
            model[8].get_parameter("weight").mul_(3)
        found.append(bits(model))
    return found


@for_each(
    ("exchange", "placement"),
    [
        ("shared", "replicate"),
        ("collective", "replicate"),
        ("shared", "offload"),
        ("collective", "partition"),
    ],
)
def test_every_device_has_the_same_rounds(exchange: Any, placement: str) -> None:
    ways = ALL_WAYS if placement == "replicate" else WAYS
    found = simulate(run, 2, args=(ways,), exchange=exchange, placement=placement)
    assert found == [run(ways, devices=2 if exchange == "shared" else 1)] * 2


@for_each("placement", ["partition", "pipeline"])
def test_the_next_trainer_takes_a_model_that_is_partitioned(placement: Any) -> None:
    def run() -> str:
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(3, 4), nn.Linear(4, 1))
        for seed in range(2):
            last = trained(model, None, seed)
        return last.fingerprint()

    found = simulate(run, 2, exchange="collective", placement=placement)
    assert set(found) == set(simulate(run, 1))


def written(where: str, end: Closes, name: str) -> None:
    """Write to a model on one device or on all, and go on with another Trainer."""
    model = nn.Sequential(nn.BatchNorm1d(3), line())
    end(trainer := trained(model, None))
    if where in ("everywhere", "at the end") or trainer.is_lead == (where == "lead"):
        with torch.no_grad():
            model.state_dict()[name].mul_(0.5)
    if where != "at the end":
        trained(model, None)


@for_each("exchange", ["shared", "collective"])
@for_each(
    ("where", "end", "name", "words"),
    [
        ("lead", "close", "1.weight", "parameter 1.weight differs between device 0 and device 1"),
        (
            "others",
            "close",
            "0.running_mean",
            "buffer 0.running_mean differs between device 0 and device 1",
        ),
        ("everywhere", "close", "1.weight", ""),
        ("everywhere", "drop", "1.weight", "parameter 1.weight changed since the previous call"),
        ("at the end", "drop", "1.weight", "weight was changed on device 1 after"),
    ],
)
def test_what_devices_write_alone_is_refused_by_name(
    exchange: Any, where: str, end: str, name: str, words: str
) -> None:
    if where == "at the end" and exchange == "collective":
        return  # nobody sees what another device shows
    args = (where, onefold.Trainer.close if end == "close" else drop, name)
    with pytest.raises(onefold.errors.OnefoldError, match=words) if words else nullcontext():
        simulate(written, 2, args=args, exchange=exchange)


@for_each("closes", [True, False])
def test_a_trainer_that_is_closed_or_whose_model_another_has_makes_no_step(closes: bool) -> None:
    optimizer = torch.optim.SGD((model := line()).parameters(), lr=0.1, momentum=0.9)
    trainer = make_trainer(model, optimizer=optimizer)
    with pytest.raises(ValueError, match="clip_norm"):
        make_trainer(model, clip_norm=-1.0)  # and takes nothing
    trainer.step(points(8))
    if closes:
        trainer.close()
    else:
        make_trainer(nn.Sequential(model, nn.Linear(1, 1)))
    assert trainer.fingerprint()
    assert not optimizer.state
    words = r"trainer.step was called after trainer.close\(\), or after another Trainer"
    with pytest.raises(RuntimeError, match=words):
        trainer.step(points(8))
    with pytest.raises(RuntimeError, match=r"SGD.step\(\) was called by the script after a Tr"):
        optimizer.step()
