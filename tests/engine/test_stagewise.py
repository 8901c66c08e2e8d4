"""Devices that keep their spans alone, between steps: fingerprints, evaluation, prediction and
checkpoints have one stage after the other brought, and give what devices with all give."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from torch import nn

import onefold
from onefold.core.flat import FlatTensors
from onefold.exchange.carrier import Want
from onefold.exchange.stagefold import StageFold

pytestmark = pytest.mark.processes

FEATURES, LAYERS = 64, 6
LAYER_BYTES = 4 * (FEATURES * FEATURES + FEATURES)


class AtHand:
    """What of the parameters was on this device in a block, besides what it keeps."""

    whole = 0
    """How many times all of them were brought."""
    most_bytes = 0
    """The most that was brought for a while."""
    stages: list[int]

    def __init__(self) -> None:
        self.stages = []


@contextmanager
def watched(trainer: onefold.Trainer) -> Iterator[AtHand]:
    found = AtHand()
    lending: Any = trainer._session.engine.lending
    want, get_back = StageFold.want, FlatTensors.get_back

    def noting_want(self: StageFold, wish: Want) -> None:
        found.stages.append(wish.stage)
        here = [room.numel() for room in lending._rooms.values()]
        found.most_bytes = max(found.most_bytes, sum(here) + wish.room.numel())
        want(self, wish)

    def noting_whole(self: FlatTensors) -> None:
        found.whole += 1
        get_back(self)

    StageFold.want = noting_want  # type: ignore[method-assign]
    FlatTensors.get_back = noting_whole  # type: ignore[method-assign]
    try:
        yield found
    finally:
        StageFold.want, FlatTensors.get_back = want, get_back  # type: ignore[method-assign]


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
        return self.frozen(x) * self.scale  # type: ignore[no-any-return]


def squared(model: nn.Module, batch: torch.Tensor) -> torch.Tensor:
    return model(batch).square().mean(dim=1)  # type: ignore[no-any-return]


def samples(count: int = 9) -> torch.Tensor:
    return torch.randn(count, FEATURES, generator=torch.Generator().manual_seed(5))


def trained(
    make: Callable[[], nn.Module] = Layered,
    loss: Callable[[Any, Any], Any] = squared,
    **settings: Any,
) -> onefold.Trainer:
    torch.manual_seed(3)
    model = make()
    parameters = [p for p in model.parameters() if p.requires_grad]
    optimizer = torch.optim.AdamW(parameters, lr=0.01)
    trainer = onefold.Trainer(model, optimizer, loss, shards=4, threads=1, **settings)
    for _ in range(2):
        trainer.step(samples())
    return trainer


def launched(function: Callable[..., Any], *given: Any, devices: int = 2, **options: Any) -> Any:
    return onefold.launch(
        function,
        devices=f"cpu:{devices}",
        args=given,
        exchange="collective",
        timeout_s=60,
        **{"keep": "span", **options},
    )


# Fingerprints


def fingerprints(precision: str | None) -> tuple[list[str], list[int], int, int]:
    settings = {} if precision is None else {"precision": precision}
    trainer = trained(**settings)
    with watched(trainer) as found:
        ours = trainer.fingerprint()
    with trainer.whole():
        theirs = trainer.fingerprint()
    trainer.step(samples())
    return [ours, theirs, trainer.fingerprint()], found.stages, found.most_bytes, found.whole


@pytest.mark.parametrize(
    ("precision", "devices"), [(None, 2), (None, 3), ("bf16-params", 2)], ids=str
)
def test_a_fingerprint_brings_a_stage_at_a_time(precision: str | None, devices: int) -> None:
    expected, *_ = fingerprints(precision)
    values, stages, most_bytes, whole = launched(fingerprints, precision, devices=devices)
    assert values == expected
    assert whole == 0
    # The lead digests every second, or third, stage.
    assert stages == list(range(0, 1 + LAYERS, devices))
    assert 0 < most_bytes <= LAYER_BYTES
