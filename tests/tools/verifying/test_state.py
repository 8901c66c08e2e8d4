"""What a step changes that it must not is found, and named by where it is."""

import random
from collections.abc import Callable
from functools import partial
from typing import Any

import numpy as np
import torch
from torch import nn

from onefold.tools.verifying.probing import StateWatch
from tests.tables import for_each

GENERATOR = np.random.default_rng(0)
HISTORY: list[float] = []


def plain(model: nn.Module, batch: Any) -> Any:
    return model(batch)


def of_data(model: nn.Module, batch: Any) -> Any:
    """While a data set draws."""
    return model(batch)


def helper(x: Any) -> Any:
    return x + GENERATOR.normal()


def with_global(model: nn.Module, batch: Any) -> Any:
    HISTORY.append(1.0)
    return helper(model(batch))


def with_several(model: nn.Module, batch: Any) -> Any:
    """A hidden state of two tensors, say."""
    HISTORY[:] = [len(HISTORY), len(HISTORY) + 1.0, *HISTORY]
    return model(batch)


def closing() -> Any:
    generator = torch.Generator().manual_seed(0)
    return lambda model, batch: model(batch) + torch.rand(1, generator=generator)


class Loss:
    def __init__(self) -> None:
        self.generator = random.Random(0)

    def __call__(self, model: nn.Module, batch: Any) -> Any:
        return model(batch) * self.generator.random()

    def method(self, model: nn.Module, batch: Any) -> Any:
        return self(model, batch)


class Keeping(nn.Linear):
    """Keeps what must be a buffer."""

    def __init__(self) -> None:
        super().__init__(1, 1)
        self.count, self.constant = 0, 3
        self.last: torch.Tensor | None = None
        self.seen: list[float] = []
        self.generators = {"torch": torch.Generator().manual_seed(0)}
        self.state = np.random.RandomState(0)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.count += 1
        self.last = x
        self.seen.append(0.0)
        torch.rand(1, generator=self.generators["torch"])
        self.state.normal()
        return super().forward(x)


def changed_by(model: nn.Module, loss: Callable[..., Any]) -> StateWatch:
    watch = StateWatch(model, [loss])
    dataset = Loss()
    watch.add(dataset)
    if loss is of_data:
        dataset.generator.random()
    with watch.step():
        loss(model, torch.ones(2, 1))
    return watch


def test_attributes_of_modules_are_named_and_nothing_else() -> None:
    watch = changed_by(nn.Linear(1, 1), plain)
    assert (watch.attributes, watch.generators) == ([], [])
    for loss in (with_global, with_several):  # once, however much has changed inside of it
        (found,) = changed_by(nn.Linear(1, 1), loss).attributes
        assert found.startswith(f"the global HISTORY, which {loss.__name__} (")
    watch = changed_by(nn.Sequential(nn.Linear(1, 1), Keeping()), plain)
    assert watch.attributes == [
        "attribute count of module 1 (Keeping)",
        "attribute last of module 1 (Keeping)",
        "attribute seen of module 1 (Keeping)",
    ]
    assert watch.generators == [
        "attribute generators of module 1 (Keeping)['torch']",
        "attribute state of module 1 (Keeping)",
    ]


@for_each(
    ("loss", "words"),
    [
        (with_global, "the global GENERATOR, which helper ("),
        (closing(), f"generator, which closing.<locals>.<lambda> ({__file__}:"),
        (of_data, "attribute generator of the data set (Loss)"),
        (Loss(), "the loss (Loss).generator"),
        (Loss().method, "the Loss of the loss.generator"),
        (partial(lambda g, m, b: m(b) * g.random(), random.Random(0)), "argument 0 of the loss"),
    ],
)
def test_generators_that_a_loss_uses_are_named(loss: Callable[..., Any], words: str) -> None:
    (found,) = changed_by(nn.Linear(1, 1), loss).generators
    assert found.startswith(words)
