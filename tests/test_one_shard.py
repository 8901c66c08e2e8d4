"""One shard gives the bits of a plain loop, whatever its devices keep of the model."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from torch import nn

import onefold
from onefold.core.options import RunOptions
from onefold.core.world import World
from onefold.errors import GradientError
from onefold.testing import simulate
from tests.small import make_trainer, sgd
from tests.tables import for_each

CLIP = 0.05
GENERATOR = torch.Generator().manual_seed(4)
BATCHES = [torch.randn(10, 6, generator=GENERATOR) for _ in range(3)]


class Mixed(nn.Module):
    """A parameter of more than one piece, one in bfloat16, one that is rarely used."""

    def __init__(self, *, rare: bool = False) -> None:
        torch.manual_seed(2)
        super().__init__()
        self.first, self.wide = nn.Linear(6, 150), nn.Linear(150, 150)
        self.low = nn.Linear(150, 4).to(torch.bfloat16)
        self.rare = nn.Linear(4, 4) if rare else None  # no line of devices can choose

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        hidden = self.wide(torch.tanh(self.first(x)))
        out: torch.Tensor = self.low(hidden.to(torch.bfloat16)).float()
        return out + self.rare(out) if self.rare and bool(x[0, 0] > 0) else out


def mean_of(model: nn.Module, batch: torch.Tensor) -> torch.Tensor:
    return (model(batch) - 3).square().mean()  # type: ignore[no-any-return]


def with_options(kit: Any) -> Callable[[nn.Module, torch.Tensor], Any]:
    """A loss whose mean is not the bits of a sum that is divided."""
    weight, targets = torch.tensor([0.3, 2.0, 1.1, 0.7]), torch.arange(10) % 4
    return lambda model, batch: kit.cross_entropy(
        model(batch), targets, weight, label_smoothing=0.1
    )


def trainer_of(model: Any, loss: Any = mean_of, **options: Any) -> onefold.Trainer:
    options["stages"] = [part for part in model.children() if isinstance(part, nn.Linear)]
    return make_trainer(model, loss, shards=1, **options)


def run(model: nn.Module, loss: Any = mean_of, **options: Any) -> list[Any]:
    """The loss and the norm of each step, and the values of the model."""
    trainer = trainer_of(model, loss, clip_norm=CLIP, **options)
    steps = [trainer.step(batch) for batch in BATCHES]
    with trainer.whole():
        values = [parameter.flatten().tolist() for parameter in model.parameters()]
    trainer.close()
    return [[(float(step.loss), step.grad_norm) for step in steps], values]


def plain(model: nn.Module, loss: Any = mean_of) -> list[Any]:
    """The loop that everybody writes."""
    optimizer, steps = sgd(model), []
    for batch in BATCHES:
        optimizer.zero_grad()
        value = loss(model, batch)
        value.backward()
        steps.append((value.item(), float(nn.utils.clip_grad_norm_(model.parameters(), CLIP))))
        optimizer.step()
    assert all(norm > CLIP for _, norm in steps)
    return [steps, [parameter.flatten().tolist() for parameter in model.parameters()]]


PLACES: list[tuple[Any, int]] = [("all", 1), ("host", 1), ("stages", 1), ("stages", 3)]
each_keep = for_each(("keep", "devices"), PLACES)


def at(keep: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    world = World(options=RunOptions(keep=keep))
    monkeypatch.setattr("onefold.trainer.current_world", lambda: world)


@each_keep
def test_the_bits_are_those_of_a_plain_loop(
    keep: str, devices: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    at(keep, monkeypatch)
    make = partial(Mixed, rare=devices == 1)
    assert run(make(), devices=devices) == plain(make())
    ours, theirs = with_options(onefold.losses), with_options(nn.functional)
    assert run(make(), ours, devices=devices) == plain(make(), theirs)


@each_keep
def test_gradients_that_are_not_finite_are_found(
    keep: str, devices: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    at(keep, monkeypatch)

    def step(factor: float, **more: Any) -> onefold.Step:
        """With a gradient that is changed before anybody takes it."""
        trainer = trainer_of(model := Mixed(rare=devices == 1), devices=devices, **more)
        before = trainer.fingerprint()
        hook = model.wide.weight.register_hook(lambda grad: grad * factor)  # type: ignore[no-untyped-call]
        try:
            return trainer.step(BATCHES[0])
        finally:
            hook.remove()
            assert (trainer.fingerprint() == before) == (factor != 1e22)
            assert factor == 1e22 or not trainer.step(BATCHES[0]).skipped
            trainer.close()

    with pytest.raises(GradientError, match=r"wide\.weight is not finite"):
        step(torch.nan)
    assert step(torch.inf, on_nonfinite="skip").skipped
    # A norm that overflows in its dtype.
    norm = step(1e22).grad_norm
    assert norm is not None
    assert 1e19 < norm < 1e30


@for_each("exchange", ["shared", "collective"])
def test_processes_of_a_line_share_the_norms_of_their_parameters(exchange: Any) -> None:
    expected = plain(Mixed())
    for found in simulate(lambda: run(Mixed(), devices=None), 3, keep="stages", exchange=exchange):
        assert found == expected
