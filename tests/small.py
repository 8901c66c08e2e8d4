"""A model small enough to follow by hand, its data, and trainers for it."""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import nn

import onefold
from onefold.session.user_parts import GivenOptimizer

Batch = tuple[torch.Tensor, torch.Tensor]


def line(inputs: int = 3) -> nn.Linear:
    """The same start values each time."""
    model = nn.Linear(inputs, 1)
    with torch.no_grad():
        model.weight.copy_(torch.linspace(-0.5, 0.5, inputs))
        model.bias.fill_(0.25)
    return model


def points(samples: int, inputs: int = 3) -> Batch:
    """Different numbers in every sample."""
    generator = torch.Generator().manual_seed(3)
    return torch.randn(samples, inputs, generator=generator), torch.randn(
        samples, 1, generator=generator
    )


def square(model: nn.Module, batch: Batch) -> torch.Tensor:
    """One loss a sample."""
    inputs, targets = batch
    return (model(inputs) - targets).square().mean(dim=1)


def sgd(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)


def make_trainer(
    model: nn.Module | Mapping[str, nn.Module] | None = None,
    loss: Callable[..., object] | Mapping[str, Callable[..., object]] = square,
    *,
    optimizer: GivenOptimizer = None,
    shards: int = 4,
    devices: int | None = 1,
    **settings: Any,
) -> onefold.Trainer:
    """A trainer whose devices this one process drives; with None it finds its own."""
    model = line() if model is None else model
    if optimizer is None:
        assert isinstance(model, nn.Module), "several models need optimizers of their own"
        optimizer = sgd(model)
    settings = {"threads": 1, "devices": ["cpu"] * devices if devices else None, **settings}
    return onefold.Trainer(model, optimizer, loss, shards=shards, **settings)


def bits(model: nn.Module) -> dict[str, bytes]:
    """All values of a model, to the last bit."""
    return {
        name: value.detach().contiguous().reshape(-1).view(torch.uint8).numpy().tobytes()
        for name, value in model.state_dict().items()
    }


def result(trainer: onefold.Trainer, batches: Sequence[Any]) -> tuple[str, str]:
    """The fingerprint after a step with each batch, and the last loss, to the last bit."""
    last = [trainer.step(batch) for batch in batches][-1]
    return trainer.fingerprint(), float(last.loss).hex()
