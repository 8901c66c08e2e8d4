"""What a line of devices does with what it has computed, and how often it computes."""

from __future__ import annotations

import gc
from collections import Counter
from collections.abc import Callable, Iterator

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import onefold
from onefold.core.options import RunOptions
from onefold.core.world import World

DEVICES, LAYERS, SHARDS = 3, 6, 4
computed: Counter[str] = Counter()


class Layer(nn.Module):
    """Batch norm and dropout; counts the calls with values and those in shape alone."""

    def __init__(self) -> None:
        super().__init__()
        self.linear, self.norm = nn.Linear(5, 5), nn.BatchNorm1d(5)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        computed["values" if type(x) is torch.Tensor else "shape"] += 1
        return F.dropout(self.norm(self.linear(x)), 0.2)


@pytest.fixture(autouse=True)
def in_line(monkeypatch: pytest.MonkeyPatch) -> None:
    """A process that nobody launched, whose devices are a line."""
    world = World(options=RunOptions(keep="stages"))
    monkeypatch.setattr("onefold.trainer.current_world", lambda: world)


@pytest.fixture
def step() -> Iterator[Callable[[], object]]:
    """Makes a step."""
    torch.manual_seed(1)
    model = nn.Sequential(*[nn.Sequential(Layer()) for _ in range(LAYERS)])
    trainer = onefold.Trainer(
        model,
        torch.optim.SGD(model.parameters(), lr=0.1),
        lambda model, batch: model(batch).square().mean(dim=1),
        stages=[part[0] for part in model],
        shards=SHARDS,
        threads=1,
        devices=["cpu"] * DEVICES,
    )
    yield lambda: trainer.step(torch.ones(SHARDS * 3, 5))
    trainer.close()


def test_a_step_leaves_nothing_to_the_collector(step: Callable[[], object]) -> None:
    """What a device was sent would wait there, and each file with it."""
    step()
    gc.collect()
    gc.disable()
    try:
        step()
        gc.set_debug(gc.DEBUG_SAVEALL)
        gc.collect()
        left = [each for each in gc.garbage if isinstance(each, torch.Tensor)]
    finally:
        gc.set_debug(0)
        gc.garbage.clear()
        gc.enable()
    assert left == []


def test_stages_of_other_devices_are_computed_in_shape_once(step: Callable[[], object]) -> None:
    step()
    computed.clear()
    step()
    assert computed == {"values": LAYERS * SHARDS}


@pytest.mark.parametrize("by_name", [False, True])
def test_the_dtype_of_what_another_device_gives_may_be_taken(
    by_name: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """`x.to(tensor)` between stages needs no values of the other tensor."""

    def fingerprint(keep: str, devices: int) -> str:
        world = World(options=RunOptions(keep=keep))  # type: ignore[arg-type]
        monkeypatch.setattr("onefold.trainer.current_world", lambda: world)
        torch.manual_seed(1)
        model = nn.Sequential(*[nn.Linear(5, 5) for _ in range(4)])
        places = torch.randn(5, dtype=torch.float64)

        def loss(model: nn.Sequential, batch: torch.Tensor) -> torch.Tensor:
            first = model[0](batch)
            x = first + (places.to(tensor=first) if by_name else places.to(first, False))
            for layer in model[1:]:
                x = layer(x)
            return x.square().mean(dim=1)

        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        trainer = onefold.Trainer(
            model, optimizer, loss, shards=4, threads=1, devices=["cpu"] * devices
        )
        trainer.step(torch.ones(8, 5))
        found = trainer.fingerprint()
        trainer.close()
        return found

    assert fingerprint("stages", 2) == fingerprint("all", 1)
