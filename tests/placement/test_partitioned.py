"""Devices that share no memory and keep partitions: what a step brings, and what a script
may do between steps, to trained parameters and to frozen ones."""

import copy
import gc
import weakref
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from torch import nn

import onefold
from onefold.deferred.access import ResidentError
from onefold.errors import OnefoldError, StateError
from onefold.launcher.environment import current_context
from tests.inside import engine_in
from tests.placement.partitioned import run, samples, trainer_of, watched
from tests.tables import for_each

FEATURES = 12


class Skipping(nn.Module):
    """Uses parameters of its layers before, in and after the layers that hold them."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(FEATURES, FEATURES) for _ in range(4))
        self.scale = nn.Parameter(torch.ones(FEATURES))
        self.beside = torch.zeros(())

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        layers: Any = self.layers
        x = nn.functional.linear(x, layers[3].weight)
        for layer in layers:
            x = x + torch.tanh(layer(x)) * self.scale
        self.beside = torch.stack([p.square().sum() for p in layers[0].parameters()]).sum()
        biases = torch.stack([layer.bias for layer in layers]).sum(dim=0)
        return x * torch.cat([layers[1].bias[:6], layers[2].bias[6:]]) + biases


def penalized(model: nn.Module, batch: torch.Tensor) -> torch.Tensor:
    outputs = model(batch).square().mean(dim=1)
    penalty = sum(p.abs().sum() for p in model.parameters())
    assert isinstance(model, Skipping)
    return outputs + 0.01 * penalty + 0.001 * model.beside


skipping = partial(trainer_of, Skipping, penalized)


def batches(count: int = 1) -> list[torch.Tensor]:
    return list(samples(9 * count, FEATURES).chunk(count))


def trained(trainer: onefold.Trainer, steps: int = 4) -> str:
    for batch in batches(steps):
        trainer.step(batch)
    return trainer.fingerprint()


def terms(model: nn.Module, batch: torch.Tensor) -> Any:
    values = model(batch)
    many = (values > 0).sum()
    return onefold.Mean(values.clamp_min(0).sum(), many) + onefold.Mean(values.sum(), len(batch))


def with_loss(loss: Any, settings: dict[str, Any]) -> str:
    return trained(trainer_of(Skipping, loss, **settings), 3)


@for_each(
    ("loss", "settings", "devices"),
    [
        (penalized, {}, 3),
        (terms, {}, 2),
        (penalized, {"microbatch": "auto"}, 2),
        (penalized, {"microbatch": 2, "clip_norm": 0.1}, 2),
        (penalized, {"precision": "bf16-params"}, 2),
    ],
)
def test_steps_have_the_bits_of_one_device(loss: Any, settings: Any, devices: int) -> None:
    """Also where parameters are used outside of their stage."""
    assert run(with_loss, loss, settings, devices=devices) == with_loss(loss, settings)


def stages_brought() -> tuple[list[int], list[bool], int, bool]:
    """The stages that a step brings to this device, and the most of them at one time."""
    trainer = trainer_of(lambda: nn.Sequential(*[nn.Linear(FEATURES, FEATURES) for _ in range(5)]))
    with watched(trainer) as found:
        trainer.step(batches(1)[0])
    (flat,) = engine_in(trainer).context.exchange.memory.trained.values()
    return found.stages, found.ahead, found.most_stages, flat.is_there


def test_a_step_brings_one_stage_after_the_other() -> None:
    brought, ahead, most, is_there = run(stages_brought)
    # The last is still here when backward begins, and nothing needs the first one's weight then.
    assert brought == [0, *[1, 2, 3, 4, 5, 4, 3, 2] * 2]
    # Nobody knows what the first shard needs next. Later ones begin with a stage that is waited
    # for, as nothing is computed before it.
    assert ahead == [False] * (1 + 8 + 1) + [True] * 7
    assert most == 4  # the root, the stage, the one before it, and the one after it
    assert not is_there


def looked_at_between_steps() -> dict[str, str]:
    trainer = skipping()
    trained(trainer, 1)
    model: Any = trainer.model
    found: dict[str, str] = {}
    looks: dict[str, Callable[[], object]] = {
        "sum": lambda: model.scale.sum(),
        "state": model.state_dict,
        "copy": lambda: copy.deepcopy(model),
        "data": lambda: model.scale.data,
        "item": lambda: model.layers[0].weight[0, 0].item(),
        "call": lambda: model(batches(1)[0]),
        "numpy": lambda: model.scale.detach().numpy(),
    }
    for name, look in looks.items():
        try:
            look()
        except RuntimeError as error:
            found[name] = str(error)
    assert [(p.shape[0], p.is_leaf) for p in model.parameters()] == [(FEATURES, True)] * 9
    model.zero_grad()
    return found


def test_a_script_cannot_read_what_is_not_there() -> None:
    found = run(looked_at_between_steps)
    assert sorted(found) == ["call", "copy", "data", "item", "numpy", "state", "sum"]
    assert all("with trainer.gathered()" in text for text in found.values())
    assert "parameter scale was read on device 0" in found["sum"]


def read_in_the_block() -> tuple[bool, list[float], list[float], str]:
    trainer = skipping()
    model: Any = trainer.model
    before = trained(trainer, 2)
    with trainer.gathered():
        array = model.scale.detach().numpy()
        values = trainer.model.state_dict()["scale"]
        same = trainer.fingerprint() == before and values.tolist() == array.tolist()
        with trainer.gathered():
            copied = copy.deepcopy(model.layers)
        trainer.step(batches(1)[0])
    return same, array.tolist(), copied[0].bias.tolist(), trainer.fingerprint()


def test_a_script_reads_and_trains_in_the_block() -> None:
    assert run(read_in_the_block) == read_in_the_block()


class Masked(nn.Module):
    """Writes to a parameter in its forward pass, so that PyTorch does not count it."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(FEATURES, FEATURES) for _ in range(3))
        self.layers[1].register_forward_pre_hook(self.mask)

    def mask(self, layer: Any, _: Any) -> None:
        layer.weight.data[:, 5].zero_()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = layer(x)
        return x


class Scaling(Masked):
    """Halves a weight when it is evaluated first, as models for mixed precision do."""

    def mask(self, layer: Any, _: Any) -> None:
        if not self.training and not hasattr(self, "is_scaled"):
            self.is_scaled = True
            layer.weight.data.mul_(0.5)


def with_a_write(make: type[nn.Module], call: str) -> None:
    trainer = trainer_of(make)
    trainer.step(batches(1)[0])
    getattr(trainer, call)(lambda m, b: {"mean": m(b).mean(dim=1)}, batches(1)[0], batch_size=9)


@for_each(
    ("make", "call", "placement", "words"),
    [
        (
            Masked,
            "evaluate",
            "partition",
            r"^parameter layers\.1\.weight was written to .* in a buffer",
        ),
        (
            Masked,
            "evaluate",
            "pipeline",
            r"layers\.1\.weight was written to during its computation .* in a buffer",
        ),
        (
            Scaling,
            "evaluate",
            "partition",
            r"layers\.1\.weight was written to during its computation",
        ),
        (
            Scaling,
            "predict",
            "pipeline",
            r"layers\.1\.weight was written to during its computation",
        ),
    ],
)
def test_what_is_written_is_named(
    make: type[nn.Module], call: str, placement: str, words: str
) -> None:
    with pytest.raises(StateError, match=words):
        run(with_a_write, make, call, placement=placement)


class Following(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(FEATURES, FEATURES) for _ in range(2))
        self.layers[1].requires_grad_(False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.layers[1](self.layers[0](x).tanh())


def changed_between_steps(way: str = "block") -> str:
    trainer = trainer_of(Following)
    layers: Any = trainer.model.layers
    weight = layers[1].weight
    trained(trainer, 1)
    if way == "block":
        with trainer.modifying(), torch.no_grad():
            weight.mul_(0.9).add_(layers[0].weight, alpha=0.1)
    elif way == "in place":
        with torch.no_grad():
            weight.mul_(0.5)
    elif way == "data":
        weight.data.mul_(0.5)
    elif way == "new data":
        weight.data = torch.zeros(FEATURES, FEATURES)
    elif way == "whole":
        with trainer.gathered():
            weight.data.mul_(0.5)
    return trained(trainer, 1)


@for_each("way", ["in place", "data", "new data", "whole"])
def test_changes_of_frozen_parameters_outside_of_the_block_are_refused(way: str) -> None:
    with pytest.raises(
        (OnefoldError, ValueError, ResidentError), match=r"parameter layers\.1\.weight"
    ):
        run(changed_between_steps, way)


def unfrozen() -> str:
    """Have gradients of frozen parameters that no optimizer holds, for a step."""
    trainer = trainer_of(Following)
    model: Any = trainer.model
    model.layers[1].requires_grad_(True)
    trained(trainer, 1)
    assert all(p.grad is None for p in model.parameters())
    model.layers[1].requires_grad_(False)
    return trained(trainer, 1)


def with_values_of_their_own() -> str:
    """Begin with other frozen values on each device: the lead's are everybody's."""

    def make() -> nn.Module:
        model: Any = Following()
        with torch.no_grad():
            model.layers[1].weight.add_(current_context().rank)
        return model

    return trained(trainer_of(make), 1)


@for_each("placement", ["partition", "pipeline"])
@for_each("work", [changed_between_steps, unfrozen, with_values_of_their_own])
def test_frozen_parameters_are_those_of_one_device(work: Callable[[], str], placement: str) -> None:
    assert run(work, placement=placement) == work()


def left_in_memory() -> int:
    """Go forward twice, the first time with nobody to go back: tanh keeps what it has made."""
    seen: list[weakref.ref[torch.Tensor]] = []

    def loss(model: nn.Module, x: torch.Tensor) -> torch.Tensor:
        seen.append(weakref.ref(x))
        model(x)
        return model(x).square().mean(dim=1)

    trainer = trainer_of(Skipping, loss)
    trainer.step(torch.ones(8, FEATURES))
    gc.collect()
    return sum(each() is not None for each in seen)


def test_a_graph_that_nobody_goes_back_through_is_let_go() -> None:
    assert run(left_in_memory) == 0
