"""Runs on simulated devices that keep partitions, and what of the model was on a device."""

import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any
from unittest import mock

import torch
from torch import nn

import onefold
from onefold.exchange.reduction import ParameterRequest, StageReduction
from tests import simulated
from tests.inside import engine_in

FEATURES, LAYERS = 64, 6
LAYER_BYTES = 4 * (FEATURES * FEATURES + FEATURES)


@dataclass
class AtHand:
    """What of the parameters was on this device in a block, besides what it keeps."""

    whole: int = 0  # how many times all of them were brought
    most_bytes: int = 0
    most_stages: int = 0
    stages: list[int] = field(default_factory=list)  # those that were brought, in their order
    ahead: list[bool] = field(default_factory=list)  # whether before they were needed


@contextmanager
def watched(trainer: onefold.Trainer) -> Iterator[AtHand]:
    found = AtHand()
    exchange = engine_in(trainer).context.exchange
    if not exchange.memory.is_partitioned:
        yield found
        return
    # Of this device: what is patched in a class would be patched for all that are simulated.
    reduction, (flat,) = exchange.reduction, exchange.memory.trained.values()
    assert isinstance(reduction, StageReduction)
    gather, get_back = reduction.request, flat.get_back
    buffers: weakref.WeakSet[torch.Tensor] = weakref.WeakSet()

    def noting_request(request: ParameterRequest) -> None:
        found.stages.append(request.stage)
        found.ahead.append(request.ahead)
        buffers.add(request.buffer)
        found.most_stages = max(found.most_stages, len(buffers))
        found.most_bytes = max(found.most_bytes, sum(buffer.numel() for buffer in buffers))
        gather(request)

    def noting_whole() -> None:
        found.whole += 1
        get_back()

    with (
        mock.patch.object(reduction, "request", noting_request),
        mock.patch.object(flat, "get_back", noting_whole),
    ):
        yield found


class Layered(nn.Module):
    """Layers of one size, a frozen one among them, weights that are shared, and a buffer."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(FEATURES, FEATURES) for _ in range(LAYERS))
        self.frozen = nn.Linear(FEATURES, FEATURES).requires_grad_(False)
        self.scale = nn.Parameter(torch.ones(FEATURES))
        self.again = self.layers[1]
        self.register_buffer("seen", torch.zeros(3))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = x + torch.tanh(layer(x))
        return self.frozen(x) * self.scale


def squared(model: nn.Module, batch: torch.Tensor) -> torch.Tensor:
    return model(batch).square().mean(dim=1)


def samples(count: int = 9, features: int = FEATURES) -> torch.Tensor:
    return torch.randn(count, features, generator=torch.Generator().manual_seed(5))


def trainer_of(
    make: Callable[[], nn.Module] = Layered,
    loss: Callable[[Any, Any], Any] = squared,
    **settings: Any,
) -> onefold.Trainer:
    torch.manual_seed(3)
    model = make()
    parameters = [p for p in model.parameters() if p.requires_grad]
    optimizer = torch.optim.AdamW(parameters, lr=0.01)
    return onefold.Trainer(model, optimizer, loss, shards=4, threads=1, **settings)


def trained(*given: Any, **settings: Any) -> onefold.Trainer:
    trainer = trainer_of(*given, **settings)
    for _ in range(2):
        trainer.step(samples())
    return trainer


def run(function: Callable[..., Any], *given: Any, devices: int = 2, **options: Any) -> Any:
    options = {"placement": "partition", "exchange": "collective", **options}
    return simulated.launch(function, devices=f"cpu:{devices}", args=given, **options)
