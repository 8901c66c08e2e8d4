"""An optimizer that draws random numbers is refused, whichever generator it draws from."""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch

import onefold
from onefold.engine import optimizercheck
from onefold.errors import StateError
from tests.small import line, make_trainer, points
from tests.tables import for_each

DRAWS: dict[str, tuple[Callable[[], object], str]] = {
    "torch": (lambda: torch.randn(()), "PyTorch's generator"),
    "python": (lambda: random.random(), "Python's random"),
    "numpy": (lambda: np.random.rand(), "NumPy's generator"),
    "half a pair": (lambda: np.random.standard_normal(), "NumPy's generator"),
}


class Noisy(torch.optim.SGD):
    """Draws in its steps from some number on, as annealed noise or stochastic rounding does."""

    draw: Callable[[], object]
    begins = 1
    done = 0

    def step(self, closure: Any = None) -> Any:
        self.done += 1
        if self.done >= self.begins:
            self.draw()
        return super().step(closure)


def trainer_of(draw: Callable[[], object], devices: int = 1, begins: int = 1) -> onefold.Trainer:
    model = line()
    optimizer = Noisy(model.parameters(), lr=0.1)
    optimizer.draw, optimizer.begins = draw, begins
    return make_trainer(model, optimizer=optimizer, devices=devices)


@for_each("devices", [1, 2])
@for_each(("draw", "name"), DRAWS.values(), ids=DRAWS)
def test_an_optimizer_that_draws_is_refused(
    draw: Callable[[], object], name: str, devices: int
) -> None:
    trainer = trainer_of(draw, devices)
    words = (
        rf"Noisy draws random numbers in step\(\), from {name}: expected none.*Trainer\(model, N"
    )
    with pytest.raises(StateError, match=words):
        trainer.step(points(8))


def test_one_that_begins_later_is_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(optimizercheck, "_EVERY", 4)
    trainer = trainer_of(lambda: torch.randn(()), begins=3)
    for _ in range(4):
        trainer.step(points(8))
    with pytest.raises(StateError, match="Noisy draws"):
        trainer.step(points(8))


def test_a_generator_of_its_own_counts_as_well() -> None:
    model = line()
    optimizer = Noisy(model.parameters(), lr=0.1)
    optimizer.own = np.random.default_rng(1)  # type: ignore[attr-defined]
    optimizer.draw = lambda: optimizer.own.normal()  # type: ignore[attr-defined]
    trainer = make_trainer(model, optimizer=optimizer)
    with pytest.raises(StateError, match=r"Noisy draws .*, from a generator of its own"):
        trainer.step(points(8))


def test_one_that_draws_nothing_is_not() -> None:
    trainer = trainer_of(lambda: None)
    assert [trainer.step(points(8)).number for _ in range(3)] == [1, 2, 3]
