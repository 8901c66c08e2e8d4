"""A device may be as late as the timeout of the run says, whatever the limit of connecting was."""

from __future__ import annotations

import time
from typing import Any

import pytest
import torch
from torch import nn

import onefold
from onefold.exchange import group

pytestmark = pytest.mark.processes

LATE_S = 2.5


class Slow(nn.Module):
    """A layer that takes its time once, on one device."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(24, 24)
        self.is_late = False

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.is_late and type(x) is torch.Tensor:
            time.sleep(LATE_S)
            self.is_late = False
        return torch.tanh(self.linear(x))


def trained(late: int) -> str:
    # The first attempt to connect has twice as long, and later ones more.
    group._CONNECTED_S = 0.4
    torch.manual_seed(1)
    model = nn.Sequential(*[Slow() for _ in range(4)])
    trainer = onefold.Trainer(
        model,
        torch.optim.AdamW(model.parameters(), lr=0.1),
        lambda model, batch: model(batch).square().mean(dim=1),
        shards=4,
        threads=1,
    )
    batch = torch.randn(8, 24, generator=torch.Generator().manual_seed(2))
    for step in range(3):
        if step == 1 and late == (0 if trainer.is_lead else 1):
            for layer in model:
                assert isinstance(layer, Slow)
                layer.is_late = True
        trainer.step(batch)
    return trainer.fingerprint()


@pytest.mark.full
@pytest.mark.parametrize("late", [0, 1])
@pytest.mark.parametrize("keep", ["all", "span", "stages"])
def test_a_device_that_is_late_is_waited_for(keep: Any, late: int) -> None:
    found = onefold.launch(
        trained,
        devices="cpu:2",
        args=(late,),
        keep=keep,
        exchange="collective",
        timeout_s=300,
    )
    assert found == onefold.launch(trained, devices=1, args=(-1,))
