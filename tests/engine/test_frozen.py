"""Frozen parameters of which each device keeps a part: what a script does to them is never lost."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

import onefold
from onefold.engine.lentparameter import Elsewhere
from onefold.errors import OnefoldError
from onefold.run.world import current_world
from tests import simulated
from tests.tables import for_each

WIDTH = 12


class Following(nn.Module):
    """A layer, and a frozen one that follows it in the way that is named."""

    def __init__(self, way: str) -> None:
        super().__init__()
        self.online = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh())
        self.slow = nn.Sequential(nn.Linear(WIDTH, WIDTH).requires_grad_(False), nn.Tanh())
        self.way = way

    @torch.no_grad()
    def follow(self) -> None:
        for ours, slow in zip(self.online.parameters(), self.slow.parameters(), strict=True):
            if self.way == "in place":
                slow.mul_(0.9).add_(ours, alpha=0.1)
            elif self.way == "data":
                slow.data.mul_(0.9).add_(ours.data, alpha=0.1)
            elif self.way == "new data":
                slow.data = slow.data * 0.9 + ours.data * 0.1

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.training:
            self.follow()
        return self.slow(self.online(x))  # type: ignore[no-any-return]


def loss(model: nn.Module, batch: torch.Tensor) -> torch.Tensor:
    return model(batch).square().mean(dim=1)  # type: ignore[no-any-return]


def samples() -> torch.Tensor:
    return torch.randn(9, WIDTH, generator=torch.Generator().manual_seed(5))


def trainer_of(way: str) -> onefold.Trainer:
    torch.manual_seed(3)
    model = Following(way)
    optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=0.01)
    return onefold.Trainer(model, optimizer, loss, shards=4, threads=1)


def launched(function: Callable[..., Any], *given: Any, keep: str = "span") -> Any:
    return simulated.launch(
        function,
        devices="cpu:2",
        args=given,
        keep=keep,
        exchange="collective",
    )


def with_writes(way: str) -> None:
    trainer_of(way).step(samples())


@for_each("way", ["in place", "data", "new data"])
def test_a_model_that_writes_to_them_is_refused_by_name(way: str) -> None:
    with pytest.raises(OnefoldError, match=r"parameter slow\.0\.\w+.*trainer\.changing"):
        launched(with_writes, way)


def changed_between_steps(way: str) -> str:
    trainer = trainer_of("")
    model: Any = trainer.model
    trainer.step(samples())
    if way == "block":
        with trainer.changing():
            model.way = "in place"
            model.follow()
            model.way = ""
    elif way == "in place":
        with torch.no_grad():
            model.slow[0].weight.mul_(0.5)
    elif way == "data":
        model.slow[0].weight.data.mul_(0.5)
    elif way == "new data":
        model.slow[0].weight.data = torch.zeros(WIDTH, WIDTH)
    elif way == "whole":
        with trainer.whole():
            model.slow[0].weight.data.mul_(0.5)
    trainer.step(samples())
    return trainer.fingerprint()


def test_between_steps_they_are_changed_in_the_block() -> None:
    alone = changed_between_steps("block")
    assert alone != changed_between_steps("")
    assert [launched(changed_between_steps, "block", keep=k) for k in ("span", "stages")] == [
        alone
    ] * 2


@for_each("way", ["in place", "data", "new data", "whole"])
def test_all_other_changes_are_refused_by_name(way: str) -> None:
    with pytest.raises((OnefoldError, ValueError, Elsewhere), match=r"parameter slow\.0\.weight"):
        launched(changed_between_steps, way)


def unfrozen() -> tuple[str, bool]:
    """Have gradients of frozen parameters that no optimizer holds, for a step."""
    trainer = trainer_of("")
    model: Any = trainer.model
    model.slow.requires_grad_(True)
    trainer.step(samples())
    left = any(p.grad is not None for p in model.parameters())
    model.slow.requires_grad_(False)
    trainer.step(samples())
    return trainer.fingerprint(), left


@for_each("keep", ["span", "stages"])
def test_they_may_have_gradients_that_nobody_takes(keep: str) -> None:
    assert launched(unfrozen, keep=keep) == unfrozen() == (unfrozen()[0], False)


def frozen_for_a_while() -> str:
    """Trained parameters that rest in a step are kept as trained ones are."""
    trainer = trainer_of("")
    model: Any = trainer.model
    for rests in (False, True, False):
        model.online[0].weight.requires_grad_(not rests)
        trainer.step(samples())
    return trainer.fingerprint()


@for_each("keep", ["span", "stages"])
def test_what_rests_for_a_while_goes_on(keep: str) -> None:
    assert launched(frozen_for_a_while, keep=keep) == frozen_for_a_while()


def with_values_of_their_own() -> str:
    """Begin with other frozen values on each device: the lead's are everybody's."""
    torch.manual_seed(3)
    model = Following("")
    with torch.no_grad():
        model.slow[0].weight.add_(current_world().rank)
    optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=0.01)
    trainer = onefold.Trainer(model, optimizer, loss, shards=4, threads=1)
    trainer.step(samples())
    return trainer.fingerprint()


@for_each("keep", ["span", "stages"])
def test_they_begin_with_the_values_of_the_lead(keep: str) -> None:
    assert launched(with_values_of_their_own, keep=keep) == with_values_of_their_own()
